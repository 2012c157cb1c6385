# SPDX-License-Identifier: Apache-2.0
"""A user's pattern on a GPU: the check command measures its error and its speed there."""

from __future__ import annotations

import pytest

from coda_inductor.cli.steps import check_file

pytestmark = pytest.mark.gpu

GATE = """
import torch
import torch.nn.functional as F
from coda_inductor import Pattern

def mish_glu(gate, up):
    return F.mish(gate) * up

PATTERN = Pattern(name="mish_glu", meaning=mish_glu)
"""


def test_gate_of_a_user_passes_every_check(tmp_path):
    """Error against float32 at most twice that of the unfused ops; a step is timed."""
    path = tmp_path / "mish_glu.py"
    path.write_text(GATE)
    results = {r.check: r for r in check_file(path)}
    failed = {name: r.detail for name, r in results.items() if r.outcome == "fail"}
    assert not failed
    assert {"error", "step"} <= results.keys()
