# SPDX-License-Identifier: Apache-2.0
"""``fp8_cast`` and ``fp8_amax`` on a CPU: torchao's own numbers, bit for bit."""

import pytest
import torch
from casting import E4M3, E5M2, SHAPES, cast_of, same, scale_of, subject

from coda_inductor.runtime import on_cuda
from coda_inductor.semantic.fp8_casts import AMAX, CAST, TILE

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("power", [False, True])
def test_casts_are_torchaos(dtype, shape, power):
    x = subject(*shape, dtype)
    rows, cols = scale_of(x, [1], E4M3, power=power), scale_of(x, [0], E5M2, power=power)
    q, qt = CAST(x, None, rows, E4M3, cols, E5M2)
    assert same(q, cast_of(x, rows, E4M3))
    assert same(qt, cast_of(x, cols, E5M2).t())
    assert q.is_contiguous()
    assert qt.is_contiguous()
    whole = scale_of(x, [], E5M2, power=power)
    q, qt = CAST(x, None, whole, E5M2, whole, E5M2)
    assert same(q, cast_of(x, whole, E5M2))
    assert same(qt, q.t())


@pytest.mark.parametrize(("power", "target"), [(False, E4M3), (True, E5M2)])
def test_the_chain_of_these_tests_is_torchaos(power, target):
    utils = pytest.importorskip("torchao.float8.float8_utils")
    by = utils.ScalingGranularity
    x = subject(24, 40, torch.bfloat16)
    for dims, how in (([0], (by.AXISWISE, 0)), ([], (by.TENSORWISE, None))):
        theirs = utils.tensor_to_scale(x, target, False, None, *how, power)
        assert same(theirs, scale_of(x, dims, target, power=power))
        q = utils.to_fp8_saturated(x.to(torch.float32) * theirs, target)
        assert same(q, cast_of(x, theirs, target))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quotients_are_those_of_torchaos_inference(dtype):
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    for shape in [s for s in SHAPES if min(s) > 1]:
        x = subject(*shape, dtype)
        for block in ((1, shape[1]), (shape[0], 1), shape):
            scale = primitives._choose_scale_float8(x, block, E4M3)
            want = primitives._quantize_affine_float8(x, scale, E4M3)
            q, qt = CAST(x, None, scale, E4M3, scale, E4M3, True)
            assert same(q, want)
            assert same(qt, want.t())
            factor = torch.rand(shape[0], 1)
            want = primitives._quantize_affine_float8(x.float() * factor, scale, E4M3)
            assert same(CAST(x, factor, scale, E4M3, None, None, True)[0], want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_and_then_a_weight_come_first_and_in_float32(dtype):
    x, factor, weight = (
        subject(30, 20, dtype),
        torch.rand(30, 1) + 0.1,
        torch.randn(1, 20, dtype=dtype),
    )
    rows, cols = scale_of(x, [1], E4M3), scale_of(x, [0], E4M3)
    q, qt = CAST(x, factor, rows, E4M3, cols, E5M2, False, weight)
    wide = x.float() * factor * weight.float()
    finite = x.nan_to_num().float() * factor
    by_row, by_column = AMAX(x.nan_to_num(), factor, True, True)
    assert same(by_row.amax(1), finite.abs().amax(1))
    # The maximum of a column's product is that of the column, times the weight.
    columns = by_column.amax(0) * weight.float().abs()[0]
    assert same(columns, (finite * weight.float()).abs().amax(0))
    assert same(q, cast_of(wide, rows, E4M3))
    assert same(qt, cast_of(wide, cols, E5M2).t())


def test_special_values_and_what_is_not_wanted():
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0, 449.0, -1e30, 2.0**-9, 2.0**-10]])
    one = torch.ones(())
    q, _ = CAST(x, None, one, E4M3, None, None)
    want = [448.0, -448.0, 0.0, 448.0, -448.0, 2.0**-9, 0.0]
    assert q[0, 0].float().isnan()
    assert q[0, 1:].float().tolist() == want
    _, qt = CAST(x, None, None, None, one, E5M2)
    assert qt[0].float().isnan()
    assert qt[1:6, 0].float().tolist() == [57344.0, -57344.0, 0.0, 448.0, -57344.0]
    assert [r.numel() for r in CAST(x, None, None, None, one, E4M3)] == [0, 8]
    assert [tuple(r.shape) for r in AMAX(x, None, False, True)] == [(0,), (1, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (TILE, TILE), (2 * TILE + 1, TILE - 1)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_maxima_are_torchs(dtype, shape, turned):
    x = subject(*shape, dtype)
    x = x.t() if turned else x
    m, k = x.shape
    rows, cols = AMAX(x, None, True, True)
    assert rows.shape == (m, -(-k // TILE))
    assert cols.shape == (-(-m // TILE), k)
    want = x.abs()
    assert same(rows.amax(1).to(dtype), want.amax(1))
    assert same(cols.amax(0).to(dtype), want.amax(0))
    assert same(rows.amax().to(dtype), want.max())
    tile = want.float()[:TILE, :TILE]  # partials are of tiles, each of its own
    assert same(rows[:TILE, 0], tile.amax(1))
    assert same(cols[0, :TILE], tile.amax(0))


@pytest.mark.parametrize("capable", [False, True])
def test_without_a_kernel_torchs_ops_run_and_one_warning_says_so(capable, monkeypatch, warned):
    """On a GPU without FP8, and where a kernel does not compile or launch."""
    pytest.importorskip("triton")
    from coda_inductor.mainloop import fp8_casts as kernels

    class Failing:
        def __getitem__(self, _):
            raise RuntimeError("PTXAS failed")

    monkeypatch.setattr(kernels, "_lacks_fp8", lambda device: not capable)
    monkeypatch.setattr(kernels, "_cast_kernel", Failing())
    monkeypatch.setattr(kernels, "_amax_kernel", Failing())
    x, one = subject(30, 20, torch.bfloat16), torch.ones(())
    for _ in range(2):
        ours = on_cuda.OPS[CAST](x, None, one, E4M3, one, E5M2)
        ours += on_cuda.OPS[AMAX](x, None, True, True)
    plain = CAST(x, None, one, E4M3, one, E5M2) + AMAX(x, None, True, True)
    assert all(same(a, b) for a, b in zip(ours, plain, strict=True))
    assert len(warned()) == 2
    cause = "PTXAS failed" if capable else "no instructions for FP8"
    assert all("falls back to torch's ops" in m and cause in m for m in warned())


def calls():
    """Arguments of each op: all that are wanted or not, ragged, turned, empty."""
    one = torch.rand(())
    for m, k in ((0, 20), (30, 0), (129, 257)):
        x, factor = torch.randn(m, k).to(torch.bfloat16), torch.rand(m, 1)
        rows, cols = torch.rand(m, 1), torch.rand(1, k)
        yield CAST, (x, None, rows, E4M3, cols, E5M2)
        yield AMAX, (x, factor, True, True)
    yield CAST, (x, factor, None, None, one, E5M2)
    yield CAST, (x, factor, rows, E4M3, cols, E5M2, False, cols.bfloat16())
    yield CAST, (x.float().t(), None, cols.t(), E4M3, None, None)
    yield AMAX, (x.t(), None, False, True)


@pytest.mark.parametrize(
    "call", list(calls()), ids=lambda c: f"{c[0].name()}{tuple(c[1][0].shape)}"
)
def test_opcheck(call):
    torch.library.opcheck(*call)
