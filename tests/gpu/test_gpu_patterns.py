# SPDX-License-Identifier: Apache-2.0
"""A user's pattern on a GPU: the check command measures its error and its speed there."""

from __future__ import annotations

from pathlib import Path

import gates
import pytest

from coda_inductor.cli.steps import check_file

pytestmark = pytest.mark.gpu


def test_gate_of_a_user_passes_every_check(tmp_path):
    """On a machine with a GPU too."""
    results = {r.check: r for r in check_file(Path(gates.write(tmp_path, gates.MISH)))}
    assert not {name: r.detail for name, r in results.items() if r.outcome == "fail"}
