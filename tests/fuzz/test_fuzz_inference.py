# SPDX-License-Identifier: Apache-2.0
"""Forward passes of random programs. A file a mode: pytest gives a file to one process."""

from __future__ import annotations

import pytest
from fuzz_seeds import outcome, report, totals

PROGRAMS = 48
#: Rewrite -> in how many of them it fires at least.
FIRES = {
    "rms_norm": 50, "layer_norm": 25, "swiglu": 25, "residual": 110, "epilogue": 75, "pair": 33,
    "sum": 3, "cross_entropy": 28, "constant_mask": 16, "raised rotate_pairs": 12,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program(seed):
    found = outcome("inference", seed)
    assert not found.failure, report("inference", seed)


def test_most_programs_say_something():
    invalid = [s for s in range(PROGRAMS) if outcome("inference", s).invalid]
    assert len(invalid) <= PROGRAMS // 20


def test_programs_reach_what_is_rewritten():
    """Outcomes are kept in this process, so that this costs nothing where all were run. FIRES is
    what 230 programs reach at least."""
    fired = totals("inference", range(PROGRAMS))
    least = {name: max(1, times * PROGRAMS // 230) for name, times in FIRES.items()}
    assert not {name: fired[name] for name in FIRES if fired[name] < least[name]}, fired
