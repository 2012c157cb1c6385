# SPDX-License-Identifier: Apache-2.0
"""How kernels read A and B: a file each, and this list of them.

A reading is all that is known of a way to read operands: when it is legal, how tensors of a call
become a kernel's A and B, which kernels that takes, what is mixed into QuACK's classes, and what
its sites are measured with. ``plain`` says what each can be asked.
"""

from __future__ import annotations

from coda_inductor.mainloop.readings.fp8 import Fp8, PairedFp8
from coda_inductor.mainloop.readings.grouped import (
    Grouped,
    GroupedAlternating,
    GroupedJoin,
    GroupedPair,
)
from coda_inductor.mainloop.readings.join import Join
from coda_inductor.mainloop.readings.pair import Pair
from coda_inductor.mainloop.readings.plain import Plain
from coda_inductor.program import EpilogueProgram

#: The first that takes a program reads its operands.
READINGS = (
    *(GroupedAlternating(), GroupedPair(), GroupedJoin(), Grouped()),
    *(PairedFp8(), Pair(), Fp8(), Join(), Plain()),
)


def reading_of(program: EpilogueProgram, terms: int = 1) -> Plain:
    """How calls of ``program`` are read; ``terms``: how many products the accumulator is of."""
    return next(each for each in READINGS if each.takes(program, terms))


def reading_with(program: EpilogueProgram, variant: str) -> Plain:
    """The reading of a kernel of ``program``.

    Raises:
        ValueError: none has this ``variant``.
    """
    for each in READINGS:
        if variant in each.variants and each is reading_of(program, each.terms):
            return each
    raise ValueError(f"no reading of {program.key} has a variant {variant!r}")
