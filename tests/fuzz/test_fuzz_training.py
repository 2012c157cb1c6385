"""Forward and backward passes of random programs. A file a mode: one process has it."""

from __future__ import annotations

import pytest
from fuzz_seeds import outcome, report

PROGRAMS = 110


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program(seed):
    found = outcome("training", seed)
    assert not found.failure, report("training", seed)


def test_most_programs_say_something():
    invalid = [s for s in range(PROGRAMS) if outcome("training", s).invalid]
    assert len(invalid) <= PROGRAMS // 20
