# SPDX-License-Identifier: Apache-2.0
"""Forward and backward passes of random programs. A file a mode: one process has it."""

from __future__ import annotations

import pytest
from fuzz_seeds import outcome, report, totals

PROGRAMS = 16
#: Rewrite -> in how many of them it fires at least.
FIRES = {
    "rms_norm": 7, "rms_norm_backward": 7, "swiglu": 7, "swiglu_backward": 7,
    "pair": 9, "sum": 2, "cross_entropy": 5, "cross_entropy_backward": 2,
    "embedding_backward": 2,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program(seed):
    found = outcome("training", seed)
    assert not found.failure, report("training", seed)


def test_most_programs_say_something():
    invalid = [s for s in range(PROGRAMS) if outcome("training", s).invalid]
    assert len(invalid) <= PROGRAMS // 20


def test_programs_reach_what_is_rewritten():
    """Outcomes are kept in this process, so that this costs nothing where all were run. FIRES is
    what 50 programs reach at least."""
    fired = totals("training", range(PROGRAMS))
    least = {name: max(1, times * PROGRAMS // 50) for name, times in FIRES.items()}
    assert not {name: fired[name] for name in FIRES if fired[name] < least[name]}, fired
