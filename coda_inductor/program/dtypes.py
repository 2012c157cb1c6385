# SPDX-License-Identifier: Apache-2.0
"""Every dtype that programs know, as torch and as text."""

import torch

HALF = (torch.bfloat16, torch.float16)
HALF_NAMES = ("bfloat16", "float16")
#: The 8-bit dtypes, as text: operands and results of scaled GEMMs. They are never computed in.
FP8 = ("float8_e4m3fn", "float8_e5m2")
#: The dtype to which an unfused GEMM of FP8 operands rounds its product: it has no FP8 results, and
#: torchao uses this one.
FP8_PRODUCT = "bfloat16"

FLOATS = (torch.float64, torch.float32, *HALF)

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, **dict.fromkeys(FP8, 1)}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``, as programs spell it."""
    return str(dtype).removeprefix("torch.")
