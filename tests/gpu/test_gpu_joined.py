# SPDX-License-Identifier: Apache-2.0
"""Two products summed by one kernel that reads all four matrices in place, on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import ARCH, NEEDS_KERNELS, check, config_for, launched
from programs import inputs, kinds

from coda_inductor.select.config import legal_configs

pytestmark = NEEDS_KERNELS

N = 264  # ragged for every tile
ORDERS = [(a, b) for a in (1, -1) for b in (1, -1)]


def terms(m: int, k: int, b_major: str = "n"):
    """(program, as_, bs, operands) with A and B both in the order of their addresses."""
    program = kinds()["norm_bwd"]
    as_, bs, operands = inputs(program, m, N, k, b_major=b_major, device="cuda", terms=2)
    as_.sort(key=torch.Tensor.data_ptr)
    bs.sort(key=torch.Tensor.data_ptr)
    return program, as_, bs, operands


@pytest.fixture
def in_place(monkeypatch):
    """Nothing may be concatenated; returns torch.cat for the test itself."""
    concatenate = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *args: pytest.fail("the terms were copied"))
    return concatenate


@pytest.mark.parametrize("b_major", ["n", "k"])
def test_as_if_concatenated_in_every_order(in_place, b_major):
    for m, k, (left, right) in itertools.product((1, 300, 1021), (64, 192, 8192), ORDERS):
        program, as_, bs, operands = terms(m, k, b_major)
        as_, bs = as_[::left], bs[::right]
        got = check(program, as_, bs, operands)
        # The kernel starts with the lower A: the same order of summation, so the same bits.
        whole_a, whole_b = in_place(as_[::left], 1), in_place(bs[::left], 0)
        whole_b = whole_b.t().contiguous().t() if b_major == "k" else whole_b
        whole = launched([whole_a], [whole_b], operands, program, config_for(program))
        for x, y in zip(got, whole, strict=True):
            assert torch.equal(x, y)


def test_halves_of_one_buffer_and_allocations_far_apart(in_place):
    program, as_, bs, operands = terms(300, 192)
    both = in_place(as_, 1)
    halves = [both[:, :192], both[:, 192:]]
    gap = torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")  # beyond 32-bit distances
    far = bs[1].clone()
    del gap
    for right in ([bs[0], far], [far, bs[0]]):
        check(program, halves, right, operands)
        check(program, halves[::-1], right, operands)


@pytest.mark.parametrize("other", ["straight", "crossed"])
def test_a_captured_call_may_find_its_tensors_in_the_other_order(in_place, other):
    """Each case has a config of its own: a kernel that has been launched is loaded."""
    program, as_, bs, operands = terms(500, 256)
    config = legal_configs(program, ARCH)[1 if other == "straight" else 2]
    first, second = (as_[::-1], as_) if other == "straight" else (as_, as_[::-1])
    launched(first, bs, operands, program, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launched(second, bs, operands, program, config)
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(captured, launched(second, bs, operands, program, config), strict=True):
        assert torch.equal(x, y)
