# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of FP8 casts and of dropout without a GPU: interpreted, and compiled for
Hopper."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from processes import python

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def types_of(x: str, q: str, qt: str) -> dict[str, str]:
    """Of the arguments of a cast."""
    vectors = dict.fromkeys(("factor", "weight", "scale", "scale_t"), "*fp32")
    sizes = dict.fromkeys(("m", "k", "stride"), "i32")
    return {"x": f"*{x}", **vectors, "q": f"*{q}", "qt": f"*{qt}", **sizes}


FORMATS = {"fp8e4nv": "cvt.rn.satfinite.e4m3x2.f32", "fp8e5": "cvt.rn.satfinite.e5m2x2.f32"}


@pytest.mark.parametrize(("kernels", "number"), [("casts", 36), ("dropouts", 35)])
def test_kernels_compute_what_plain_torch_does(kernels, number):
    if kernels == "dropouts":
        pytest.importorskip("triton", minversion="3.9")  # the loops of 3.6's need an older NumPy
    done = python(Path(__file__).parent / "interpreted.py", kernels)
    assert done.stdout == f"{number} tensors agree\n", done.stderr


def compiled(kernel, types: Mapping[str, str], constants: Mapping[str, object], **options) -> str:
    """PTX of a kernel for sm_90 whose pointers and integers are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    whole = [name for name in names if name in types and types[name] != "fp32"]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    return made.asm["ptx"]


def moved(ptx: str) -> set[str]:
    """Whether tensors are read (ld) and written (st) in 16 bytes a thread."""
    found = re.findall(r"\b((?:ld|st)\.global[.\w:]*\.v4\.b32)\b", ptx)
    return {name[:2] for name in found}


@pytest.mark.parametrize(("dtype", "hows", "formats", "conversions"), [
    ("bf16", (0, 2, 3), ("fp8e4nv", "fp8e5"), (32, 32)),  # rows and columns, one dtype each
    ("bf16", (2, 1, 1), ("fp8e4nv", "fp8e4nv"), (32, 32)),  # one scale, and a norm's factor
    ("fp32", (0, 2, 0), ("fp8e5", "fp8e4nv"), (32, 0)),  # as it lies only
    ("bf16", (0, 0, 3), ("fp8e5", "fp8e4nv"), (0, 32)),  # transposed only
])  # fmt: skip
def test_casts_compile_and_saturate(dtype, hows, formats, conversions):
    from coda_inductor.mainloop.fp8_casts import _STRAIGHT, _TILE, _TURNED, _cast_kernel

    tile_k = _TURNED if hows[2] else _STRAIGHT
    constants = dict(zip(("FACTOR", "SCALE", "SCALE_T"), hows, strict=True))
    constants |= {"WEIGHT": 0, "DIVIDE": False, "TILE_M": _TILE // tile_k, "TILE_K": tile_k}
    ptx = compiled(_cast_kernel, types_of(dtype, *formats), constants)
    assert moved(ptx) == {"ld", "st"}
    if hows[2] and dtype != "fp32":
        assert re.search(r"ldmatrix[.\w]*\.trans", ptx), "turned byte by byte"
    for name, instruction in FORMATS.items():  # 64 values a thread, two an instruction
        want = sum(n for f, n in zip(formats, conversions, strict=True) if f == name)
        assert ptx.count(instruction) == want


@pytest.mark.parametrize(("hows", "quotients"), [((2, 2, 0), 64), ((0, 1, 1), 128)])
def test_a_division_by_a_scale_is_a_product_and_its_correction(hows, quotients):
    """Two for each of 64 elements, and in each result; divisions are for scales at the ends."""
    from coda_inductor.mainloop.fp8_casts import _cast_kernel

    constants = dict(zip(("FACTOR", "SCALE", "SCALE_T"), hows, strict=True))
    constants |= {"WEIGHT": 3, "DIVIDE": True, "TILE_M": 128, "TILE_K": 64}
    ptx = compiled(_cast_kernel, types_of("bf16", "fp8e4nv", "fp8e4nv"), constants)
    assert moved(ptx) == {"ld", "st"}
    assert ptx.count("fma.rn.f32") == 2 * quotients
    assert quotients < ptx.count("div.rn.f32") < 2 * quotients


@pytest.mark.parametrize("wanted", [(True, True), (True, False)])
def test_maxima_compile(wanted):
    from coda_inductor.mainloop.fp8_casts import _WARPS, _amax_kernel
    from coda_inductor.semantic.fp8_casts import TILE

    types = {"x": "*bf16", **dict.fromkeys(("factor", "over_rows", "over_columns"), "*fp32")}
    types |= dict.fromkeys(("m", "k", "stride"), "i32")
    constants = {"FACTOR": 2, "ROWS": wanted[0], "COLUMNS": wanted[1], "TILE": TILE}
    warps = _WARPS[wanted[1]]
    assert "ld" in moved(compiled(_amax_kernel, types, constants, num_warps=warps))


@pytest.mark.parametrize(("count", "rank", "dtype"), [
    (3, 16, "fp32"), (2, 128, "bf16"), (1, 256, "fp32"),
])  # fmt: skip
def test_dropouts_kernels_compile(count, rank, dtype):
    from coda_inductor.mainloop import dropout

    types = dict.fromkeys(("x", "weight", "dt", "dx"), f"*{dtype}")
    types |= {"seed": "*i64", "out": "*fp32", "dweight": "*fp32"}
    types |= dict.fromkeys(("m", "k", "stride", "first", "count", "rank", "span"), "i32")
    constants = {"DROPPED": 6554, "SCALE": 1.1, "RANK": rank, "PRECISION": "tf32"}
    more = {"COUNT": count, "DX": True, "DW": True}
    forward, backward = dropout.tiles(count, rank)
    for kernel, (rows, columns, warps), flags in (
        (dropout._dropout_forward, forward, {}), (dropout._dropout_backward, backward, more),
    ):  # fmt: skip
        own = {name: types[name] for name in kernel.arg_names if name in types}
        sizes = {"ROWS": rows, "COLUMNS": columns, **flags}
        ptx = compiled(kernel, own, constants | sizes, num_warps=warps)
        assert "mul.hi.u32" in ptx
