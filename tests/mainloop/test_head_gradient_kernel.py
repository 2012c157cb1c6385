# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of heads' gradients without a GPU: interpreted, and compiled for Hopper."""

from __future__ import annotations

import pytest
from triton_kernels import compiled, interpreted

pytest.importorskip("triton")


def test_the_kernel_computes_what_plain_torch_does():
    assert interpreted("interpreted_heads.py") == "96 gradients agree\n"


@pytest.mark.parametrize("norm", [False, True], ids=["rotation", "norm"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_the_kernel_compiles_and_reads_whole_sectors(size, norm, tmp_path, monkeypatch):
    """16 bytes a load of what is as large as the tensor; no register is spilled."""
    from coda_inductor.mainloop import head_gradients

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, half = head_gradients._head_gradient_kernel, size // 2
    _, _, tokens, heads = head_gradients.programs(8192, 32, size)
    constants = {"HALF": half, "COLUMNS": half, "TOKENS": tokens, "HEADS": heads, "INVERSE": True}
    constants |= dict.fromkeys(("NEIGHBOURS", "PAIRED"), False)
    constants |= dict.fromkeys(("NORM", "WEIGHT", "PARTIALS"), norm) | {"SCALED": True}
    types = {n: "i64" if n[-2:] in ("_b", "_h", "_t") else "i32" for n in kernel.arg_names}
    types |= dict.fromkeys(("dy", "cos", "sin", "z", "weight", "dz", "scaled"), "*bf16")
    types |= {"scale": "*fp32", "partials": "*fp32", "eps": "fp32"}
    types = {name: of for name, of in types.items() if name not in constants}
    ptx = compiled(kernel, types, constants, num_warps=head_gradients._WARPS)
    assert "st.local" not in ptx
    assert ptx.count("ld.global.v4.b32") >= (8 if norm else 6)  # halves of dy, tables and z
    assert ptx.count("st.global.v4.b32") == 4  # halves of both results
