# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of FP8 casts and dropout without a GPU: interpreted, and compiled for Hopper."""

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
    vectors = dict.fromkeys(("factor", "weight", "scale", "scale_t"), "*fp32")
    sizes = dict.fromkeys(("m", "k", "stride"), "i32")
    return {"x": f"*{x}", **vectors, "q": f"*{q}", "qt": f"*{qt}", **sizes}


@pytest.mark.parametrize("kernels", ["casts", "dropouts"])
def test_kernels_compute_what_plain_torch_does(kernels):
    if kernels == "dropouts":
        pytest.importorskip("triton", minversion="3.9")  # the loops of 3.6's need an older NumPy
    python(Path(__file__).parent / "interpreted.py", kernels)


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


def test_casts_compile_and_saturate():
    """By rows and turned, to a dtype each."""
    from coda_inductor.mainloop.fp8_casts import _TILE, _TURNED, _cast_kernel

    constants = {"FACTOR": 2, "SCALE": 2, "SCALE_T": 3, "WEIGHT": 0, "DIVIDE": False}
    constants |= {"TILE_M": _TILE // _TURNED, "TILE_K": _TURNED}
    ptx = compiled(_cast_kernel, types_of("bf16", "fp8e4nv", "fp8e5"), constants)
    assert moved(ptx) == {"ld", "st"}
    assert re.search(r"ldmatrix[.\w]*\.trans", ptx), "turned byte by byte"
    for name in ("e4m3x2", "e5m2x2"):  # 64 values a thread, two an instruction
        assert ptx.count(f"cvt.rn.satfinite.{name}.f32") == 32


@pytest.mark.parametrize(("count", "rank", "size"), [(1, 256, 4), (2, 16, 2), (3, 16, 2)])
def test_dropouts_kernels_compile(count, rank, size):
    from coda_inductor.mainloop import dropout

    types = dict.fromkeys(("x", "weight", "dt", "dx"), "*fp32" if size == 4 else "*bf16")
    types |= {"seed": "*i64", "out": "*fp32", "dweight": "*fp32"}
    types |= dict.fromkeys(("m", "k", "stride", "first", "count", "rank", "span"), "i32")
    constants = {"DROPPED": 6554, "SCALE": 1.1, "RANK": rank, "PRECISION": "tf32"}
    more = {"COUNT": count, "DX": True, "DW": True}
    kernels = (dropout._dropout_forward, {}), (dropout._dropout_backward, more)
    for (kernel, flags), tile in zip(kernels, dropout.tiles(count, rank, size), strict=True):
        own = {name: types[name] for name in kernel.arg_names if name in types}
        sizes = {"ROWS": tile[0], "COLUMNS": tile[1], **flags}
        ptx = compiled(kernel, own, constants | sizes, num_warps=tile[2])
        assert "mul.hi.u32" in ptx
