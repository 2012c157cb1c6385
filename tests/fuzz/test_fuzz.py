# SPDX-License-Identifier: Apache-2.0
"""Random programs: forward passes, training, rounding, bits, and a sample of Inductor's code.

The same ones each time; ``make fuzz`` hunts with others: ``FUZZ`` is "SEED N".
"""

import os

import pytest
from fuzz_seeds import outcome, report

#: Mode -> how many programs; code generation takes seconds a program, and one of its two trains.
PROGRAMS = {"inference": 15, "training": 12, "rounding": 4, "bits": 3, "end_to_end": 2}
#: Which mode each of twenty seeds of a hunt is for.
SHARES = (*["inference"] * 7, *["training"] * 7, *["rounding"] * 3, "bits", *["end_to_end"] * 2)


def cases() -> list[tuple[str, int]]:
    if "FUZZ" in os.environ:
        first, count = map(int, os.environ["FUZZ"].split())
        return [(SHARES[seed % len(SHARES)], seed) for seed in range(first, first + count)]
    return [(mode, seed) for mode, count in PROGRAMS.items() for seed in range(count)]


@pytest.mark.parametrize(("mode", "seed"), cases())
def test_program(mode, seed, record_property):
    found = outcome(mode, seed)
    record_property("fired", ["say nothing"] if found.invalid else sorted(found.counts))
    assert not found.failure, report(mode, seed)


@pytest.mark.skipif("FUZZ" in os.environ, reason="a hunt has other programs")
def test_programs_say_something():
    """Outcomes are kept in this process, so that this costs nothing where all were run."""
    for mode, count in PROGRAMS.items():
        invalid = [seed for seed in range(count) if outcome(mode, seed).invalid]
        assert len(invalid) <= count // 20, (mode, invalid)
