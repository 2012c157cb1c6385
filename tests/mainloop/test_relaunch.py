# SPDX-License-Identifier: Apache-2.0
"""A launch is made again only with what a compiled Triton kernel was specialized for."""

from __future__ import annotations

import pytest
import torch
from head_cases import arguments

pytest.importorskip("triton")

from coda_inductor.mainloop import fp8_casts, head_gradients, relaunch
from coda_inductor.mainloop.relaunch import Launches
from coda_inductor.runtime.head_gradients import _launched

M, K = 32, 64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Kernel:
    """Counts what Triton would bind (``first``) and what it would not (``again``)."""

    def __init__(self):
        self.first, self.again = [], []

    def __getitem__(self, grid):
        def bind(*args, **options):
            self.first.append((grid, args, options))
            return {grid: lambda *others: self.again.append((grid, others))}

        return bind


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    monkeypatch.setattr(fp8_casts, "_CASTS", Launches(made))
    monkeypatch.setattr(fp8_casts, "_MAXIMA", Launches(made))
    monkeypatch.setattr(fp8_casts, "current", lambda _: True)
    return made


def cast(x=None, scale=None, scale_t=None, factor=None, dtype=E4M3, **how):
    x = torch.randn(M, K).bfloat16() if x is None else x
    m, k = x.shape
    scale = torch.ones(m, 1) if scale is None else scale
    q = torch.empty(m, k, dtype=dtype)
    qt = torch.empty(k, m, dtype=dtype) if scale_t is not None else torch.empty(0, dtype=E4M3)
    fp8_casts.cast(x, factor, scale, scale_t, q, qt, **how)
    return x, scale, q, qt


def test_the_next_launch_has_its_own_tensors_and_the_same_constants(kernel):
    cast()
    x, scale, q, qt = cast()
    ((grid, bound, _),), ((same, args),) = kernel.first, kernel.again
    assert grid == same
    assert [id(a) for a in args[:7]] == [id(v) for v in (x, x, x, scale, x, q, qt)]
    assert args[7:] == bound[7:]


OTHER_CASTS = {
    "K": {"x": torch.randn(M, 2 * K).bfloat16()},
    "M": {"x": torch.randn(2 * M, K).bfloat16()},
    "dtype": {"x": torch.randn(M, K).half()},
    "stride": {"x": torch.randn(M, 2 * K).bfloat16()[:, :K]},
    "alignment of x": {"x": torch.randn(M * K + 1).bfloat16()[1:].view(M, K)},
    "columns' scales": {"scale": torch.ones(1, K)},
    "one scale": {"scale": torch.ones(())},
    "alignment of a scale": {"scale": torch.ones(M + 1, 1)[1:]},
    "two layouts": {"scale_t": torch.ones(1, K)},
    "a factor": {"factor": torch.ones(M, 1)},
    "FP8's dtype": {"dtype": E5M2},
    "division": {"divide": True},
    "a weight": {"weight": torch.ones(1, K)},
}


@pytest.mark.parametrize("other", OTHER_CASTS.values(), ids=OTHER_CASTS)
def test_another_launch_is_bound_anew(kernel, other):
    cast()
    for again in (0, 1):
        cast(**other)
        assert (len(kernel.first), len(kernel.again)) == (2, again)


def test_what_was_copied_is_bound_each_time(kernel):
    for _ in range(2):
        cast(x=torch.randn(2 * M, 2 * K).bfloat16()[::2, ::2])
        cast(scale=torch.ones(M, 2)[:, :1].as_strided((M, 1), (2, 1)))
    assert (len(kernel.first), len(kernel.again)) == (4, 0)


def test_the_current_device_is_looked_at(kernel, monkeypatch):
    cast()
    monkeypatch.setattr(fp8_casts, "current", lambda _: False)
    cast()
    assert (len(kernel.first), len(kernel.again)) == (2, 0)


def test_maxima_too(kernel):
    for rows, cols in ((True, True), (True, True), (True, False)):
        x = torch.randn(M, K).bfloat16()
        given = [torch.empty(size if wanted else 0) for wanted, size in ((rows, M), (cols, K))]
        fp8_casts.amax(x, None, *given, 128)
    assert (len(kernel.first), len(kernel.again)) == (2, 1)


@pytest.fixture
def gradients(monkeypatch):
    """Calls the kernel of heads' gradients; counts as ``kernel`` does."""
    made = Kernel()
    monkeypatch.setattr(head_gradients, "_LAUNCHES", Launches(made))
    monkeypatch.setattr(head_gradients, "current", lambda _: True)

    def call(shape=(2, 3, 37, 16), dtype=torch.bfloat16, how=(1, 1, 1), eps=None, **kind):
        *given, usual, distance, paired, inverse, dweight = arguments(shape, dtype, how=how, **kind)
        eps = usual if eps is None else eps
        _launched(*given, eps, distance == 1, paired, inverse, dweight)
        return given

    return made, call


def test_gradients_of_heads_too(gradients):
    made, call = gradients
    call()
    given = call()
    ((grid, bound, options),), ((same, args),) = made.first, made.again
    assert grid == same
    assert options == {"num_warps": 4}
    assert [id(a) for a in args[:6]] == [*map(id, given)]
    assert args[9:] == bound[9:]
    assert len(args) == len(head_gradients._head_gradient_kernel.arg_names)


OTHER_GRADIENTS = {
    "batch": {"shape": (1, 3, 37, 16)},
    "heads": {"shape": (2, 6, 37, 16)},
    "tokens": {"shape": (2, 3, 38, 16)},
    "size": {"shape": (2, 3, 37, 32)},
    "dtype": {"dtype": torch.float16},
    "neither norm nor scale": {"how": (0, 0, 0)},
    "only a norm": {"how": (1, 0, 0)},
    "only a scale": {"how": (0, 0, 1)},
    "neighbours": {"neighbours": True},
    "an angle a pair": {"paired": True},
    "the rotation itself": {"inverse": False},
    "eps": {"eps": 1e-3},
}


@pytest.mark.parametrize("other", OTHER_GRADIENTS.values(), ids=OTHER_GRADIENTS)
def test_another_gradient_of_heads_is_bound_anew(gradients, other):
    made, call = gradients
    call()
    for again in (0, 1):
        call(**other)
        assert (len(made.first), len(made.again)) == (2, again)


def test_sizes_without_end_are_not_all_kept(kernel, monkeypatch):
    monkeypatch.setattr(relaunch, "_MOST", 4)
    for m in range(1, 10):
        cast(x=torch.randn(m, K).bfloat16())
        assert len(fp8_casts._CASTS.known) <= 4
