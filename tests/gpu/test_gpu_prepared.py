# SPDX-License-Identifier: Apache-2.0
"""Calls that go from their tensors to the kernel: whatever two calls of one kind may differ in, the
second must be as right as the first."""

import pytest
import torch
from oracle import NEEDS_KERNELS, check, config_for, launched
from programs import B_MAJOR, TERMS, inputs, kinds, legal

from coda_inductor.runtime.launch import Kernel
from coda_inductor.select.config import Config

pytestmark = [*NEEDS_KERNELS, pytest.mark.usefixtures("fresh")]
N, K = 264, 128
NAMES = list(kinds())


def case(name: str, m: int = 300, device: str = "cuda"):
    program = legal(kinds()[name])
    how = {"b_major": B_MAJOR[name], "terms": TERMS[name]}
    return program, *inputs(program, m, N, K, device=device, **how)


@pytest.fixture
def prepared(monkeypatch):
    """Makes the first call of a kind; from then on the long way is a failure."""

    def first(name: str):
        program, *tensors = case(name)
        launched(*tensors, program, config_for(program))
        monkeypatch.setattr(Kernel, "launch", lambda *_: pytest.fail("the long way"))

    return first


@pytest.mark.parametrize("name", NAMES)
def test_as_right_as_the_first(prepared, name):
    prepared(name)
    for m in (300, 0, 1, 77, 1021):
        program, *tensors = case(name, m)
        one = check(program, *tensors) if m else launched(*tensors, program, config_for(program))
        two = launched(*tensors, program, config_for(program))
        for x, y in zip(one, two, strict=True):
            assert torch.equal(x, y)
            assert not x.numel() or x.data_ptr() != y.data_ptr()
            assert x.is_contiguous()


def test_on_the_current_stream(prepared):
    prepared("dswiglu")
    program, as_, bs, operands = case("dswiglu", 2048)
    want = launched(as_, bs, operands, program, config_for(program))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what follows on this stream finds the values, no other
        late = [torch.zeros_like(x) for x in operands]
        for x, y in zip(late, operands, strict=True):
            x.copy_(y)
        got = launched(as_, bs, late, program, config_for(program))
    stream.synchronize()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_dynamic_kernels_share_no_counter(prepared):
    """On two streams and in a replayed graph at once; there are more tiles than processors."""
    program, *tensors = case("scale", 16384)
    static = Config(128, 128, 2, 1, True)
    dynamic = static.dynamic_twin()
    want = launched(*tensors, program, static)
    got = launched(*tensors, program, dynamic)
    prepared("scale")  # from here on the long way fails
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [launched(*tensors, program, dynamic) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = [got]
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found += [launched(*tensors, program, dynamic) for _ in range(10)]
        with torch.cuda.stream(streams[0]):
            graph.replay()
    torch.cuda.synchronize()
    for (x,) in found + captured:
        assert torch.equal(x, want[0])
