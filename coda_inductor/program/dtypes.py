# SPDX-License-Identifier: Apache-2.0
"""Every dtype that programs know, as torch and as text."""

from __future__ import annotations

import torch

HALF = (torch.bfloat16, torch.float16)


FLOATS = (torch.float64, torch.float32, *HALF)

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``, as programs spell it."""
    return str(dtype).removeprefix("torch.")
