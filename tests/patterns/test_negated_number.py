# SPDX-License-Identifier: Apache-2.0
"""A number of a meaning that is used with its sign changed, as in gpt-oss's clamped gate."""

import pytest
import torch
from harness import Harness

GATE = """
import torch
from coda_inductor import Pattern

def clamped(gate, up, limit: float):
    return (up.clamp(min=-limit, max=limit) + 1) * torch.sigmoid(gate.clamp(max=limit)) * gate

PATTERN = Pattern(name="clamped", meaning=clamped)
"""

pytestmark = pytest.mark.usefixtures("prove_here")


@pytest.mark.parametrize(("low", "matches"), [(-7.0, 1), (-6.0, 0), (7.0, 0)])
def test_a_number_and_its_negative_are_one_parameter(tmp_path, low, matches):
    path = tmp_path / "clamped.py"
    path.write_text(GATE)

    def by_hand(gate, up):
        return (up.clamp(min=low, max=7.0) + 1) * torch.sigmoid(gate.clamp(max=7.0)) * gate

    harness = Harness(patterns=[str(path)])
    gate, up = 9 * torch.randn(3, 4), 9 * torch.randn(3, 4)
    torch.testing.assert_close(harness.run(by_hand, gate, up), by_hand(gate, up))
    found = [n for n in harness.raised.nodes if "coda_inductor.clamped" in str(n.target)]
    assert len(found) == matches
