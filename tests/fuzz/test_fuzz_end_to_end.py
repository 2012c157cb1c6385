# SPDX-License-Identifier: Apache-2.0
"""A sample of random programs through the backend and Inductor: values and compile time."""

from __future__ import annotations

import statistics

import pytest
from fuzz_seeds import outcome, report

#: One trains. Code generation takes seconds a program.
PROGRAMS = 2
#: Over random programs compiling took 1.07 times Inductor's time.
SLOWER = 1.5


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_program(seed):
    found = outcome("end_to_end", seed)
    assert not found.failure, report("end_to_end", seed)


def test_compile_time(record_property):
    found = [outcome("end_to_end", seed) for seed in range(PROGRAMS)]
    ratios = [o.seconds / o.stock_seconds for o in found if not o.invalid]
    record_property("compile time, of Inductor's", statistics.median(ratios))
    assert statistics.median(ratios) < SLOWER
