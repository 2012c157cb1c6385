# SPDX-License-Identifier: Apache-2.0
"""Calls that go from their tensors to the kernel, on a CPU: the kernel's entry point is a recorder,
everything above it is QuACK's and ours."""

import ctypes
import functools
import weakref

import pytest
import torch
from programs import B_MAJOR, TERMS, fp8, inputs, kinds, legal, programs

pytest.importorskip("quack")

import quack.gemm_runtime.host as host

from coda_inductor.errors import KernelError
from coda_inductor.mainloop import mod, plan
from coda_inductor.mainloop.readings import pair
from coda_inductor.runtime import launch, op, prepared
from coda_inductor.runtime.launch import Kernel
from coda_inductor.select.config import Config

CONFIG = Config(128, 128, 2, 1, True)
DYNAMIC = str(CONFIG.dynamic_twin())
M, N, K = 300, 72, 64
ONE_EACH = {
    **{name: legal(program) for name, program in kinds().items()},
    **{name: p for name, p in programs().items() if p.stores and name not in kinds()},
    **{name: fp8()[name] for name in ("fp8_residual", "fp8_swiglu_fast")},
}


class Entry:
    """In the kernel's place: what it was called with, and how often the long way was gone."""

    def __init__(self):
        self.calls: list[tuple] = []
        self.long_ways = 0
        self.error: Exception | None = None

    def __call__(self, which, *arguments):
        self.calls.append((which, *arguments))
        if self.error is not None:
            raise self.error


@pytest.fixture
def entry(monkeypatch):
    """CPU tensors go where CUDA tensors go, down to the kernel's entry point."""
    made = Entry()
    launch.kernel.cache_clear()
    monkeypatch.setattr(launch, "_on_device", lambda _: torch.no_grad())
    monkeypatch.setattr(op, "_unsupported", lambda *_: None)
    monkeypatch.setattr(prepared, "current_device", lambda: -1)
    monkeypatch.setattr(
        prepared, "empty_strided_cuda", lambda *how: torch.empty_strided(*how[:2], dtype=how[2])
    )
    monkeypatch.setattr(pair, "foreign_view", view_of)
    compiled = functools.partial(functools.partial, made)  # of a class of kernels
    monkeypatch.setattr(host, "_compile_gemm_epi", lambda which, *_, **__: compiled(repr(which)))
    monkeypatch.setattr(host, "get_max_active_clusters", lambda *_: 66)
    long_way = Kernel.launch

    def counted(self, *tensors):
        made.long_ways += 1
        return long_way(self, *tensors)

    monkeypatch.setattr(Kernel, "launch", counted)
    mod.load.cache_clear()  # plans are kept in what it returns
    yield made
    mod.load.cache_clear()


def view_of(pointer, shape, strides, dtype, _device):
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (dtype.itemsize * (last + 1))).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides).mT


def case(name: str, m: int = M, batch: int = 1):
    """(as_, bs, operands, program's text, config) of a call, its tensors by address."""
    program = ONE_EACH[name]
    how = {"b_major": B_MAJOR.get(name, "k"), "terms": TERMS.get(name, 1), "batch": batch}
    as_, bs, operands = inputs(program, m, N, K, **how)
    as_.sort(key=torch.Tensor.data_ptr)
    bs.sort(key=torch.Tensor.data_ptr)
    return as_, bs, operands, program.to_json(), str(CONFIG)


def plain(value, outputs):
    """An argument of a kernel, comparable: outputs by their number."""
    if isinstance(value, torch.Tensor):
        places = [i for i, x in enumerate(outputs) if x.data_ptr() == value.data_ptr()]
        where = places or value.data_ptr()
        return where, value.shape, value.stride(), value.dtype
    if isinstance(value, tuple):
        return tuple(plain(x, outputs) for x in value)
    return value if value is None or isinstance(value, str) else int(value)


def given(entry, call):
    """What the kernel gets in a call, and whether that went the long way."""
    before = entry.long_ways
    outputs = op._cuda(*call, "site", True)
    return plain(entry.calls[-1], outputs), entry.long_ways > before, outputs


@pytest.mark.parametrize("name", list(ONE_EACH))
def test_the_kernel_gets_what_quack_gives_it(entry, name):
    call = case(name)
    first, long, outputs = given(entry, call)
    assert long
    second, long, again = given(entry, call)
    copied = ONE_EACH[name].paired and any(r.axis == "col" for r in ONE_EACH[name].reduces)
    assert long is copied  # every other column is taken out of a buffer that no one else has
    if not copied:
        assert second == first
    for x, y in zip(outputs, again, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        assert x.data_ptr() != y.data_ptr()


@pytest.mark.parametrize("name", list(kinds()))
def test_calls_that_differ_in_rows_addresses_and_order_are_alike(entry, name):
    given(entry, case(name))
    for m in (1, 1021):
        as_, bs, operands, text, config = case(name, m)
        for left, right in ((as_[::-1], bs), (as_, bs[::-1])):
            call = left, right, operands, text, config
            got, long, outputs = given(entry, call)
            assert not long
            launch.kernel(text, config)._prepared.clear()
            want, long, expected = given(entry, call)
            assert long
            assert got == want
            assert [x.shape for x in outputs] == [x.shape for x in expected]
    assert len(launch.kernel(text, config)._prepared) == 1


def off(x):
    """A copy at an address that is no multiple of 16 bytes."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)[1:]
    return flat.as_strided(x.shape, x.stride(), 1).copy_(x)


#: What another call of the same site may bring: (as_, bs, operands) -> the same, changed.
OTHERWISE = {
    "A at an odd address": lambda a, b, o: ([off(a[0]), a[1]], b, o),
    "operands at odd addresses": lambda a, b, o: (a, b, [off(x) for x in o]),
    "a tile of another dtype": lambda a, b, o: (a, b, [o[0].float(), *o[1:]]),
    "one row for all": lambda a, b, o: (a, b, [o[0][:1].expand(o[0].shape), *o[1:]]),
    "a tile the other way round": lambda a, b, o: (a, b, [o[0].t().contiguous().t(), *o[1:]]),
    "every other element": lambda a, b, o: (a, b, [*o[:2], torch.stack([o[2]] * 2, 1)[:, 0], o[3]]),
    "one A twice": lambda a, b, o: ([a[0], a[0]], b, o),
    "overlapping rows": lambda a, b, o: ([x.clone().as_strided(x.shape, (8, 1)) for x in a], b, o),
    "terms of other strides": lambda a, b, o: ([a[0], torch.cat([a[1]] * 2, 1)[:, :K]], b, o),
    "A of the other major": lambda a, b, o: ([x.t().contiguous().t() for x in a], b, o),
}


#: A table of the call -> another one, and whether the kernel reads that in place.
TABLES = {
    "at an odd address": (off, False),
    "one row for all": (lambda x: x[:1].expand(x.shape), False),
    "cosines beside sines": (lambda x: torch.cat([x, x], 1)[:, : x.shape[1]], True),
}


@pytest.mark.parametrize("name", list(TABLES))
def test_tables_are_read_in_place_where_tma_can(entry, name):
    as_, bs, (rstd, cos, sin), *how = case("rotary")
    change, in_place = TABLES[name]
    for _ in range(2):
        call = as_, bs, [rstd, change(cos), sin], *how
        arguments, long, _ = given(entry, call)
        address = call[2][1].data_ptr()
        assert in_place == (address in [x[0] for x in flat(arguments)])
    assert long is not in_place


@pytest.mark.parametrize("name", list(OTHERWISE))
def test_what_cannot_be_read_in_place_goes_the_long_way_each_time(entry, name):
    as_, bs, operands, *how = case("norm_bwd_joined")
    given(entry, (as_, bs, operands, *how))
    changed = OTHERWISE[name](as_, bs, operands)
    for _ in range(2):
        arguments, long, _ = given(entry, (*changed, *how))
        assert long
        assert all(x[0] % 16 == 0 for x in flat(arguments) if isinstance(x[0], int))
    assert not given(entry, (as_, bs, operands, *how))[1]


def flat(arguments):
    for x in arguments:
        if isinstance(x, tuple) and len(x) == 4 and isinstance(x[3], torch.dtype):
            yield x
        elif isinstance(x, tuple):
            yield from flat(x)


def test_the_current_device_is_asked_at_each_call(entry, monkeypatch):
    call = case("norm_bwd_joined")
    assert [given(entry, call)[1] for _ in range(2)] == [True, False]
    monkeypatch.setattr(prepared, "current_device", lambda: 1)
    assert given(entry, call)[1]


def test_more_rows_than_lie_apart_in_memory_go_the_long_way(entry):
    """Columns of A, 64 elements apart, overlap then."""
    _, bs, (scale,), *how = case("scale", 80)
    memory = torch.zeros(64 * K + 16, dtype=bs[0].dtype)
    for m, want in ((64, True), (56, False), (80, True), (80, True)):
        a = memory.as_strided((m, K), (1, 64))
        assert given(entry, ([a], bs, [scale[:m]], *how))[1] is want


def test_no_kernel_has_a_tile_of_three_parts_of_a_batch(entry):
    """Sizes that were symbolic when it was compiled; before and after a call is prepared."""
    for prepare in (False, True):
        if prepare:
            given(entry, case("gated", 600, 2))
            assert not given(entry, case("gated", 512, 2))[1]
        before, call = len(entry.calls), case("gated", 510, 2)
        torch.testing.assert_close(op._cuda(*call), op._reference(*call), rtol=0, atol=0)
        with pytest.raises(KernelError, match="fewer rows than the largest tile, 256"):
            op._cuda(*call, "", True)
        assert len(entry.calls) == before


def test_what_is_kept_is_bounded(entry):
    (a,), bs, operands, *how = case("scale", 600)
    for m in range(8, 600):
        turned = a[:m].t().contiguous().t()  # its strides hold M
        given(entry, ([turned], bs, [operands[0][:m]], *how))
    kept = launch.kernel(*how)
    assert 1 < len(kept._prepared) <= launch._MOST_PREPARED


def test_what_the_kernel_refuses_goes_the_long_way(entry, monkeypatch, caplog):
    call = case("scale")
    given(entry, call)
    entry.error = ValueError("Mismatched Tensor")
    with pytest.raises(Exception, match="Mismatched Tensor"):
        op._cuda(*call, "site", True)
    assert entry.long_ways == 2
    entry.error = None
    assert not given(entry, call)[1]
    launch.kernel.cache_clear()
    monkeypatch.setattr(launch, "prepare", lambda *_: 1 / 0)
    assert [given(entry, call)[1] for _ in range(3)] == [True] * 3
    assert not caplog.messages


@pytest.fixture
def counters(monkeypatch):
    made, new = [], plan.counter

    def counter(a):
        made.append(new(a))
        return made[-1]

    monkeypatch.setattr(plan, "counter", counter)
    return made


@pytest.mark.parametrize("name", ["scale", "swiglu", "norm_bwd_joined"])
def test_a_dynamic_kernel_gets_what_quack_gives_it(entry, counters, name):
    call = *case(name)[:4], DYNAMIC
    seen = []
    for long in (True, False, False):
        found = given(entry, call)[:2]
        address = counters[-1].data_ptr()
        assert found[1] is long
        assert [x.tolist() for x in counters] == [[0]] * len(counters)
        assert (counters[-1].dtype, counters[-1].device) == (torch.int32, call[0][0].device)
        seen.append(replaced(found[0], address))
    assert seen[0] == seen[1] == seen[2]
    assert "counter" in str(seen[0])
    assert len({x.data_ptr() for x in counters}) == len(counters) == 3


def replaced(value, address):
    if isinstance(value, tuple):
        return tuple(replaced(x, address) for x in value)
    return "counter" if isinstance(value, int) and value == address else value


def test_a_counter_lives_until_its_kernel_is_launched_and_no_longer(entry, counters, monkeypatch):
    alive, references, launched = [], [], plan.launch_gemm

    def launch_gemm(*arguments):
        references.append(weakref.ref(counters.pop()))
        alive.append(references[-1]() is not None)
        launched(*arguments)

    monkeypatch.setattr(plan, "launch_gemm", launch_gemm)
    call = *case("scale")[:4], DYNAMIC
    for _ in range(3):
        given(entry, call)
    assert alive == [True, True]
    assert all(reference() is None for reference in references)
