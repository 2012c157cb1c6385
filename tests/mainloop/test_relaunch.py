# SPDX-License-Identifier: Apache-2.0
"""A launch is made again only with what a compiled Triton kernel was specialized for."""

import pytest
import torch

pytest.importorskip("triton")

from coda_inductor.mainloop import fp8_casts

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
    monkeypatch.setattr(fp8_casts, "_cast_kernel", made)
    monkeypatch.setattr(fp8_casts, "_amax_kernel", made)
    monkeypatch.setattr(fp8_casts, "_launchers", {})
    monkeypatch.setattr(fp8_casts, "_current", lambda _: True)
    return made


def cast(x=None, scale=None, scale_t=None, factor=None, dtype=E4M3, **how):
    x = torch.randn(M, K).bfloat16() if x is None else x
    scale = torch.ones(x.shape[0], 1) if scale is None else scale
    return x, scale, *fp8_casts.fp8_cast(x, factor, scale, dtype, scale_t, dtype, **how)


def test_the_next_launch_has_its_own_tensors_and_the_same_constants(kernel):
    cast()
    x, scale, q, qt = cast()
    ((grid, bound, _),), ((same, args),) = kernel.first, kernel.again
    assert grid == same
    assert [id(a) for a in args[:7]] == [id(v) for v in (x, x, x, scale, x, q, qt)]
    assert args[7:] == bound[7:]


OTHER_CASTS = {
    "K": {"x": torch.randn(M, 2 * K).bfloat16()}, "M": {"x": torch.randn(2 * M, K).bfloat16()},
    "dtype": {"x": torch.randn(M, K).half()},
    "stride": {"x": torch.randn(M, 2 * K).bfloat16()[:, :K]},
    "alignment of x": {"x": torch.randn(M * K + 1).bfloat16()[1:].view(M, K)},
    "columns' scales": {"scale": torch.ones(1, K)}, "one scale": {"scale": torch.ones(())},
    "alignment of a scale": {"scale": torch.ones(M + 1, 1)[1:]},
    "two layouts": {"scale_t": torch.ones(1, K)}, "a factor": {"factor": torch.ones(M, 1)},
    "FP8's dtype": {"dtype": E5M2}, "division": {"divide": True},
    "a weight": {"weight": torch.ones(1, K)},
}  # fmt: skip


@pytest.mark.parametrize("other", OTHER_CASTS.values(), ids=OTHER_CASTS)
def test_another_launch_is_bound_anew(kernel, other):
    cast()
    for again in (0, 1):
        cast(**other)
        assert (len(kernel.first), len(kernel.again)) == (2, again)


def test_what_was_copied_or_is_of_another_device_is_bound_each_time(kernel, monkeypatch):
    for _ in range(2):
        cast(x=torch.randn(2 * M, 2 * K).bfloat16()[::2, ::2])
        cast(scale=torch.ones(M, 2)[:, :1].as_strided((M, 1), (2, 1)))
    assert (len(kernel.first), len(kernel.again)) == (4, 0)
    cast()
    monkeypatch.setattr(fp8_casts, "_current", lambda _: False)
    cast()
    assert (len(kernel.first), len(kernel.again)) == (6, 0)
