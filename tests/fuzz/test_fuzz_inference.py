# SPDX-License-Identifier: Apache-2.0
"""Forward passes of random programs. A file a mode: pytest gives a file to one process."""

from __future__ import annotations

import pytest
from fuzz_seeds import outcome, report, totals

PROGRAMS = 24
#: Rewrite -> in how many of them it fires at least.
FIRES = {
    "rms_norm": 8, "layer_norm": 3, "swiglu": 4, "residual": 18, "epilogue": 7, "pair": 6,
    "sum": 1, "cross_entropy": 4, "constant_mask": 1, "raised rotate_pairs": 1,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program(seed):
    found = outcome("inference", seed)
    assert not found.failure, report("inference", seed)


def test_programs_say_something_and_reach_what_is_rewritten():
    """Outcomes are kept in this process, so that this costs nothing where all were run."""
    invalid = [s for s in range(PROGRAMS) if outcome("inference", s).invalid]
    assert len(invalid) <= PROGRAMS // 20
    fired = totals("inference", range(PROGRAMS))
    assert not {name: fired[name] for name, least in FIRES.items() if fired[name] < least}, fired
