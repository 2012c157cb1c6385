# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of dropout without a GPU: interpreted, and compiled for Hopper."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python
from test_cast_kernels import compiled, own_cache  # noqa: F401 (a fixture)

pytest.importorskip("triton")


def test_kernels_compute_what_plain_torch_does():
    pytest.importorskip("triton", minversion="3.9")  # the loops of 3.6's need an older NumPy
    done = python(Path(__file__).parent / "interpreted_dropout.py")
    assert done.stdout == "35 tensors agree\n", done.stderr


@pytest.mark.parametrize(("count", "rank"), [(1, 16), (3, 16), (4, 64), (2, 128), (1, 256)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile(count, rank, dtype):
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
