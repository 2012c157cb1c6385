# SPDX-License-Identifier: Apache-2.0
"""How A and B are read, on a CPU: what is read in place, what is copied, what neither."""

import math

import pytest
import torch
from programs import fp8, inputs, kinds

from coda_inductor.mainloop import tensors
from coda_inductor.mainloop.readings import pair, reading_of
from coda_inductor.mainloop.readings.grouped import GroupedJoin, GroupedPair
from coda_inductor.mainloop.readings.join import joinable
from coda_inductor.mainloop.readings.pair import pair_order
from coda_inductor.mainloop.tensors import UnpairableError, tma_matrix, vector

M, N, F = 40, 72, 64
JOIN = reading_of(kinds()["norm_bwd"], 2)


def terms():
    """(as_, bs), each two halves of one buffer with a gap, so that the order is known."""
    left, right = torch.randn(3 * M, F).bfloat16(), torch.randn(3 * F, N).bfloat16()
    return [left[:M], left[2 * M :]], [right[:F], right[2 * F :]]


@pytest.mark.parametrize(("a_order", "b_order"), [(1, 1), (1, -1), (-1, 1)])
def test_terms_in_place_start_at_the_lower_addresses_and_tell_whose_they_are(a_order, b_order):
    as_, bs = terms()
    a, b, variant, distances = JOIN.bind(as_[::a_order], bs[::b_order])
    assert a is as_[0]
    assert b is bs[0]
    assert variant == "joined"
    assert distances == (2 * M * F, 2 * F * N, a_order == -1, b_order == -1)


def turned(x):
    """The same numbers, of the other major."""
    return x.t().contiguous().t()


def off(m: int, n: int, dtype=torch.bfloat16):
    """A matrix 8 bytes behind a multiple of 16."""
    first = 8 // dtype.itemsize
    return torch.zeros(m * n + first, dtype=dtype)[first:].view(m, n)


def wider(m: int, n: int, more: int):
    return torch.randn(m, n + more).bfloat16()[:, :n]


REFUSED = {
    "three terms": lambda a, b: ([*a, a[0]], [*b, b[0]]),
    "unequal K": lambda a, b: ([a[0], a[1][:, :32]], [b[0], b[1][:32]]),
    "short K": lambda a, b: ([x[:, :40] for x in a], [x[:40] for x in b]),
    "another row stride": lambda a, b: ([a[0], wider(M, F, F)], b),
    "majors that differ": lambda a, b: (a, [b[0], turned(b[1])]),
    "m-major": lambda a, b: ([turned(x) for x in a], b),
    "no unit stride": lambda a, b: (a, [torch.stack([x, x], -1)[..., 0] for x in b]),
    "odd rows": lambda a, b: (a, [wider(F, N, 4) for _ in b]),
    "overlapping rows": lambda a, b: (a, [x.as_strided((F, N), (64, 1)) for x in b]),
    "dtypes": lambda a, b: (a, [b[0], b[1].half()]),
    "float32": lambda a, b: ([x.float() for x in a], [x.float() for x in b]),
    "one matrix twice": lambda a, b: ([a[0], a[0]], b),
    "an odd address": lambda a, b: (a, [b[0], off(F, N)]),
}
AT_A_CALL = {"one matrix twice", "an odd address"}


@pytest.mark.parametrize("name", REFUSED)
def test_terms_that_cannot_be_read_in_place_are_copied(name):
    as_, bs = REFUSED[name](*terms())
    assert joinable(as_, bs) == (name in AT_A_CALL)
    with pytest.raises(UnpairableError):
        JOIN.reads(as_, bs)(as_, bs)
    if len({x.dtype for x in (*as_, *bs)}) == 1:
        a, b, *how = JOIN.bind(as_, bs)
        assert how == ["", ()]
        assert torch.equal(a, torch.cat([*as_], 1))
        assert torch.equal(b, torch.cat([*bs], 0))


def test_terms_of_experts_are_read_so_too():
    """The distance of a term's own matrices is a stride as well."""
    a, b, join = terms()[0], torch.randn(2, 3, N, F).bfloat16(), GroupedJoin()
    odd = torch.zeros(8 * N * F).bfloat16().as_strided((2, 3, N, F), (4 * N * F, N * F + 4, F, 1))
    assert not joinable(a, [*odd[:, :, :F]])
    for bs in (b[:2, :, :F, :], b[:2, :, :F, :].mT):
        got_a, got_b, variant, distances = join.bind(a, [bs[0], bs[1]])
        assert (got_a is a[0], variant) == (True, "joined")
        assert got_b.data_ptr() == bs[0].data_ptr()
        assert distances == (2 * M * F, 3 * N * F, 0, 0)
        assert join.in_place(a, [*bs]) is not None
    short = [x[:, : F - 8] for x in a], [x[:, : F - 8] for x in b]
    left, both, *how = join.bind(*short)
    assert how == ["", ()]
    assert torch.equal(both, torch.cat(short[1], 1))
    assert torch.equal(left, torch.cat(short[0], 1))
    assert join.in_place(*short) is None


def test_a_pair_is_one_operand_of_twice_the_columns(monkeypatch):
    monkeypatch.setattr(pair, "foreign_view", lambda pointer, *how: (pointer, *how[:2]))
    a, b = terms()[0][:1], torch.randn(2, 3, N, F).bfloat16()
    for reading, (one, two), shape, strides in (
        (reading_of(kinds()["swiglu"]), b[0, :2].mT, (2 * N, F), (F, 1)),
        (GroupedPair(), b.mT, (3, 2 * N, F), (N * F, F, 1)),
    ):
        for order in ([one, two], [two, one]):
            _, view, variant, distances = reading.bind(a, order)
            assert view == (one.data_ptr(), shape, strides)
            assert variant == ("" if order[0] is one else "swapped")
            assert distances == ((two.data_ptr() - one.data_ptr()) // 2,)


@pytest.mark.parametrize(("experts", "dtype"), [((), torch.float8_e4m3fn), ((3,), torch.bfloat16)])
def test_a_pair_that_cannot_be_read_in_place_is_copied(monkeypatch, experts, dtype):
    """As on a host with several GPUs, where two allocations may be 2**46 bytes apart."""
    size = N * F * dtype.itemsize * math.prod(experts)
    monkeypatch.setattr(tensors, "_MAX_STRIDE", 4 * size)
    reading = GroupedPair() if experts else reading_of(kinds()["swiglu"])
    memory, odd = torch.randn(9, *experts, N, F).to(dtype), torch.zeros(*experts, N, F + 4)
    one, far, odd = memory[0].mT, memory[8].mT, odd.to(dtype)[..., :F].mT
    a = terms()[0][:1]
    for bs in ([one, far], [far, one], [one, one], [one, odd], [odd, odd]):
        _, view, variant, distances = reading.bind(a, bs)
        assert (variant, distances) == ("", (one.numel(),))
        lanes = view.mT.as_strided((2, *one.mT.shape), (one.numel(), *one.mT.stride()))
        for lane, b in zip(lanes, bs, strict=True):
            assert torch.equal(lane.float(), b.mT.float())
        with pytest.raises(UnpairableError):
            reading.reads(a, bs)(a, bs)
    for bs in ([one, one[..., :8]], [one[..., :4, :], far[..., :4, :]]):
        with pytest.raises(UnpairableError):
            reading.bind(a, bs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_no_pair(dtype):
    low, odd = torch.zeros(N, F, dtype=dtype).t(), torch.zeros(2 * N, F + 4, dtype=dtype)[:, :F]
    for first, second, why in (
        (low, off(N, F, dtype).t(), "a legal TMA stride"),
        (low, torch.zeros(N + 8, F, dtype=dtype).t(), "differ in shape"),
        (low, torch.zeros(N, F, dtype=torch.float16).t(), "dtype"),
        (low, torch.zeros(F, N, dtype=dtype), "strides"),
        (odd[:N].t(), odd[N:].t(), "16-byte rows"),
    ):
        with pytest.raises(UnpairableError, match=why):
            pair_order(first, second)


@pytest.mark.parametrize(("a_major", "b_major"), [("k", "n"), ("m", "k")])
def test_fp8_operands_that_are_not_contiguous_along_k_are_copied(a_major, b_major):
    program = fp8()["fp8_activated"]
    (a,), (b,), _ = inputs(program, M, N + 8, F)
    given = a if a_major == "k" else turned(a), b if b_major == "k" else b.contiguous()
    got = reading_of(program).bind([given[0]], [given[1]])
    assert (got[0].stride(), got[1].stride()) == ((F, 1), (1, F))
    assert torch.equal(got[0].float(), a.float())
    assert torch.equal(got[1].float(), b.float())
    same = got[0] is given[0], got[1].data_ptr() == given[1].data_ptr()
    assert same == (a_major == "k", b_major == "k")
    assert reading_of(program).kernels([given[0]], [given[1]]) == [("k", "k", "")]


def test_only_what_tma_cannot_read_is_copied():
    x = torch.randn(48, 64).to(torch.bfloat16)
    assert tma_matrix(x) is x
    assert tma_matrix(x[:, :40]).data_ptr() == x.data_ptr()
    transposed = x.t()
    assert tma_matrix(transposed, either_major=True) is transposed
    one_row = x.as_strided((1, 64), (1, 1))
    copied = [x[:, 1:], x[:, ::2], x[:1].expand(48, 64), transposed, x[:, :60][:, 4:], one_row]
    for view in copied:
        ready = tma_matrix(view)
        assert ready.data_ptr() != view.data_ptr()
        assert ready.stride() == (view.shape[1], 1)
        assert torch.equal(ready, view)
    flat = torch.randn(3 * 33 * 64).to(torch.bfloat16)
    experts = flat.view(3, 33, 64)[:, :32]
    assert tma_matrix(experts) is experts
    for view in (
        flat[1 : 1 + 3 * 32 * 64].view(3, 32, 64),
        flat.as_strided((3, 9, 64), (900, 64, 1)),
    ):
        ready = tma_matrix(view)  # its address, and the distance between two experts
        assert ready.data_ptr() != view.data_ptr()
        assert torch.equal(ready, view)
    row = x[0]
    assert vector(row) is row
    for view in (row[1:], x[:, 0], row[:1].expand(64)):
        assert vector(view).stride() == (1,)
        assert vector(view).data_ptr() % 16 == 0
        assert torch.equal(vector(view), view)
