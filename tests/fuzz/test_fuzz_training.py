# SPDX-License-Identifier: Apache-2.0
"""Random programs that train, their rounding errors, and a sample through Inductor's code. A file
apart from those of inference: pytest gives a file to one process."""

from __future__ import annotations

import pytest
from fuzz_seeds import outcome, report, totals

#: Mode -> how many programs; code generation takes seconds a program, and one of its two trains.
PROGRAMS = {"training": 16, "rounding": 6, "end_to_end": 2}
#: Rewrite -> in how many of those that train it fires at least.
FIRES = {
    "rms_norm": 2, "rms_norm_backward": 2, "swiglu": 2, "swiglu_backward": 2, "pair": 2, "sum": 1,
    "cross_entropy": 1, "cross_entropy_backward": 1, "embedding_backward": 1,
}  # fmt: skip


@pytest.mark.parametrize(("mode", "seed"), [(m, s) for m, n in PROGRAMS.items() for s in range(n)])
def test_program(mode, seed):
    found = outcome(mode, seed)
    assert not found.failure, report(mode, seed)


def test_programs_say_something_and_reach_what_is_rewritten():
    """Outcomes are kept in this process, so that this costs nothing where all were run."""
    assert not [(m, s) for m, n in PROGRAMS.items() for s in range(n) if outcome(m, s).invalid]
    fired = totals("training", range(PROGRAMS["training"]))
    assert not {name: fired[name] for name, least in FIRES.items() if fired[name] < least}, fired
