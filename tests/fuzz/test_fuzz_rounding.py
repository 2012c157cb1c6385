# SPDX-License-Identifier: Apache-2.0
"""Rounding errors of random programs. A file a mode: pytest gives a file to one process."""

from __future__ import annotations

import pytest
from fuzz_seeds import outcome, report

PROGRAMS = 6


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program(seed):
    found = outcome("rounding", seed)
    assert not found.failure, report("rounding", seed)


def test_most_programs_say_something():
    invalid = [s for s in range(PROGRAMS) if outcome("rounding", s).invalid]
    assert len(invalid) <= PROGRAMS // 20
