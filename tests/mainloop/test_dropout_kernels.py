# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of dropout without a GPU, interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python

pytest.importorskip("triton")


def test_kernels_compute_what_plain_torch_does():
    done = python(Path(__file__).parent / "interpreted_dropout.py")
    assert done.stdout == "35 tensors agree\n", done.stderr
