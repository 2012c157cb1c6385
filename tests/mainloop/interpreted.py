# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of ``mainloop/fp8_casts.py`` and of ``mainloop/dropout.py`` in Triton's
interpreter, against plain torch: ``casts`` or ``dropouts``, which the command names.

A script: ``TRITON_INTERPRET`` counts when a kernel is defined. The interpreter rounds wrongly to
FP8 (a carry into the exponent doubles it), so the kernels write float32 here, and torch casts.
Triton 3.6's rounds a fused multiply and add twice: float64 stands for it.
"""

import functools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from casting import E4M3, E5M2, cast_of, same, scale_of, subject
from triton.runtime import interpreter

from coda_inductor.mainloop import dropout as kernels
from coda_inductor.mainloop import fp8_casts
from coda_inductor.semantic import dropout as plain
from coda_inductor.semantic.fp8_casts import AMAX, CAST, TURN

HALF, SINGLE = torch.float16, torch.float32


def check_casts(x: torch.Tensor, factor: torch.Tensor | None) -> None:
    """With every scale, divisions or a norm's weight; some scales are extreme, zero, inf or NaN."""
    m, k = x.shape
    rows, cols = scale_of(x, [1], E4M3), scale_of(x, [0], E5M2)
    one, other = scale_of(x, [], E4M3), torch.tensor(0.375)
    pairs = ((rows, cols), (one, one), (one, None), (None, rows), (cols, one))
    ways = [(*pair, False, None) for pair in pairs]
    if factor is None:
        ends = torch.tensor([1e-40, 3e38, 0.0, torch.inf, torch.nan, -3.0]).repeat(m)[:m, None]
        by = ((1 / rows).to(x.dtype).float(), ends)
        ways += [(scale, scale, True, None) for scale in by]
    else:
        ways += [(rows, other, False, torch.randn(1, k).bfloat16())]
    unit = torch.ones(())
    for scale, scale_t, divide, weight in ways:
        results = q, qt = torch.full((m, k), 7.0), torch.full((k, m), 7.0)
        fp8_casts.cast_results = lambda *_, results=results: results
        fp8_casts.fp8_cast(x, factor, scale, None, scale_t, None, divide=divide, weight=weight)
        for got, by, target, turn in ((q, scale, E4M3, False), (qt, scale_t, E5M2, True)):
            if by is None:
                assert (got == 7.0).all()
                continue
            one_of_two = (None, None, by, target) if turn else (by, target, None, None)
            want = CAST(x, factor, *one_of_two, divide, weight)[turn]
            assert same(cast_of(got, unit, target), want), (x.shape, x.dtype, by.shape, turn)


def check_maxima(x: torch.Tensor, factor: torch.Tensor | None) -> None:
    for row, col in ((True, True), (False, True)):
        want = AMAX(x, factor, row, col)
        got = fp8_casts.fp8_amax(x, factor, row, col)
        assert all(same(g, w) for g, w in zip(got, want, strict=True)), (x.shape, x.dtype)


def check_turn(m: int, k: int) -> None:
    """All bytes, those of NaNs too."""
    weight = torch.arange(m * k).to(torch.uint8).view(E4M3).view(m, k)
    for x in (weight, weight.t()):
        want, got = (turn(x, x).view(torch.uint8) for turn in (TURN, fp8_casts.fp8_turn))
        assert torch.equal(got, want)
        assert torch.equal(got, x.view(torch.uint8).t())


def fma(_builder: object, x: object, y: object, z: object) -> object:
    """In place of the interpreter's; products of float32 are exact in float64."""
    wide = [handle.data.astype(np.float64) for handle in (x, y, z)]
    with np.errstate(all="ignore"):
        rounded = (wide[0] * wide[1] + wide[2]).astype(np.float32)
    return interpreter.TensorHandle(rounded, z.dtype.scalar)


def patch_once() -> None:
    """The interpreter puts its functions in the place of Triton's once for each
    function of ours, and leaves them there, instead of at each call (a third of the time)."""
    patch = interpreter._patch_lang

    class Kept:
        def restore(self) -> None:
            pass

    @functools.cache
    def patch_and_keep(function: object) -> Kept:
        patch(function)
        return Kept()

    interpreter._patch_lang = patch_and_keep


def casts() -> None:
    interpreter.InterpreterBuilder.create_fma = fma
    patch_once()
    check_turn(127, 129)
    for shape in ((3, 5), (127, 129)):
        x, half, single = (subject(*shape, t) for t in (torch.bfloat16, HALF, SINGLE))
        wide = torch.cat([x, x], 1)
        for how in (half, single, x.t(), wide[:, : shape[1]], wide[:, ::2], x[:1].expand(shape)):
            for factor in (None, torch.rand(how.shape[0], 1) + 0.5):
                check_casts(how, factor)
                check_maxima(how, factor)


#: Leading sizes, K, rank, masks, p, dtypes of x and of the weights.
DROPOUTS = (
    ((2, 35), 200, 8, 3, 0.1, SINGLE, SINGLE),
    ((70,), 301, 12, 2, 0.5, HALF, HALF),
    ((1, 1), 64, 1, 4, 0.7, SINGLE, HALF),
    ((0, 4), 64, 8, 2, 0.7, HALF, HALF),
)


def dropouts() -> None:
    for lead, k, rank, masks, p, of_x, of_weights in DROPOUTS:
        x = torch.randn(*lead, 2 * k, dtype=of_x)[..., :k]
        weight = torch.randn(masks * rank, k, dtype=of_weights) / k**0.5
        others = weight, torch.tensor([-3]), 5, masks, p
        t = plain.dropout_linear(x, *others)
        dt = torch.randn_like(t)
        pairs = [(t, kernels.dropout_linear(x, *others))]
        for needs in ([True, True], [True, False], [False, True]):
            want = plain.dropout_linear_backward(dt, x, *others, needs)
            pairs += zip(want, kernels.dropout_linear_backward(dt, x, *others, needs), strict=True)
        for want, got in pairs:
            bound = 2e-3 if want.dtype == HALF else 2e-6
            most = want.abs().max().item() if want.numel() else 0.0
            torch.testing.assert_close(got, want, rtol=bound, atol=bound * most)


if __name__ == "__main__":
    {"casts": casts, "dropouts": dropouts}[sys.argv[1]]()
