# SPDX-License-Identifier: Apache-2.0
"""Two products summed by one kernel that reads all four matrices in place, on a GPU."""

from __future__ import annotations

import pytest
import torch
from oracle import NEEDS_KERNELS, build, check, config_for, launched
from programs import inputs, kinds, programs

from coda_inductor.runtime.launch import requests
from coda_inductor.runtime.pool import KernelRequest, wait
from coda_inductor.select.config import legal_configs
from coda_inductor.select.device import arch_of

pytestmark = NEEDS_KERNELS

N = 264  # ragged for every tile
ORDERS = [(a, b) for a in (1, -1) for b in (1, -1)]


def program_of(name: str, dtype: str = "bfloat16"):
    return {**kinds(dtype), "chain": programs(dtype)["chain"]}[name]


def terms(name: str, m: int, k: int, b_major: str = "n", dtype: str = "bfloat16"):
    """(program, as_, bs, operands) with A and B both in the order of their addresses."""
    program = program_of(name, dtype)
    as_, bs, operands = inputs(program, m, N, k, b_major=b_major, device="cuda", terms=2)
    as_.sort(key=torch.Tensor.data_ptr)
    bs.sort(key=torch.Tensor.data_ptr)
    return program, as_, bs, operands


@pytest.fixture(scope="module", autouse=True)
def compiled():
    wanted = []
    for name, dtype in (("norm_bwd", "bfloat16"), ("norm_bwd", "float16"), ("chain", "bfloat16")):
        program = program_of(name, dtype)
        text, config = program.to_json(), str(config_for(program))
        wanted += [KernelRequest(text, config, b_major=b) for b in "nk"]
        for b_major in "nk":
            as_, bs, _ = inputs(program, 8, 64, 64, b_major=b_major, terms=2)
            wanted += requests(as_, bs, text, config)
    build(wanted)


@pytest.fixture
def in_place(monkeypatch):
    """Nothing may be concatenated; returns torch.cat for the test itself."""
    concatenate = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *args: pytest.fail("the terms were copied"))
    return concatenate


@pytest.mark.parametrize("k", [64, 192, 8192])
@pytest.mark.parametrize("m", [1, 300, 1021])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("b_major", ["n", "k"])
def test_as_if_concatenated_in_every_order(in_place, b_major, order, m, k):
    program, as_, bs, operands = terms("norm_bwd", m, k, b_major)
    as_, bs = as_[:: order[0]], bs[:: order[1]]
    got = check(program, as_, bs, operands)
    # The kernel starts with the lower A: the same order of summation, so the same bits.
    lower = as_[0] is min(as_, key=torch.Tensor.data_ptr)
    step = 1 if lower else -1
    whole_a = in_place(as_[::step], 1)
    whole_b = in_place(bs[::step], 0)
    whole_b = whole_b.t().contiguous().t() if b_major == "k" else whole_b
    whole = launched([whole_a], [whole_b], operands, program, config_for(program))
    for x, y in zip(got, whole, strict=True):
        assert torch.equal(x, y)


def test_halves_of_one_buffer_and_allocations_far_apart(in_place):
    program, as_, bs, operands = terms("norm_bwd", 300, 192)
    both = in_place(as_, 1)
    halves = [both[:, :192], both[:, 192:]]
    gap = torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")  # beyond 32-bit distances
    far = bs[1].clone()
    del gap
    for right in ([bs[0], far], [far, bs[0]]):
        check(program, halves, right, operands)
        check(program, halves[::-1], right, operands)


def test_what_cannot_be_read_in_place_is_copied():
    program, (a0, a1), (b0, b1), operands = terms("norm_bwd", 300, 192)
    check(program, [a0, a1, a0], [b0, b1, b1], operands)
    check(program, [a0, a0], [b0, b1], operands)
    check(program, [a0, a1[:, :64]], [b0, b1[:64]], operands)
    check(program, [a0[:, :72], a1[:, :72]], [b0[:72], b1[:72]], operands)
    check(program, [a0, a1.t().contiguous().t()], [b0, b1], operands)
    check(program, [a0, a1], [b0, b1.t().contiguous().t()], operands)


@pytest.mark.parametrize("other", ["straight", "crossed"])
def test_a_captured_call_may_find_its_tensors_in_the_other_order(in_place, other):
    """Each case has a config of its own: a kernel that has been launched is loaded."""
    program, as_, bs, operands = terms("norm_bwd", 500, 256)
    config = legal_configs(program, arch_of())[1 if other == "straight" else 2]
    assert not any(wait(requests(as_, bs, program.to_json(), str(config))).values())
    first, second = (as_[::-1], as_) if other == "straight" else (as_, as_[::-1])
    launched(first, bs, operands, program, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launched(second, bs, operands, program, config)
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(captured, launched(second, bs, operands, program, config), strict=True):
        assert torch.equal(x, y)
