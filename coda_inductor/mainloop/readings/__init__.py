# SPDX-License-Identifier: Apache-2.0
"""How kernels read A and B: one file for each way, and the list of all of them.

A reading describes one way to read operands: when it is legal, how tensors of a call become a
kernel's A and B, which kernels that needs, the mixins of QuACK's classes, and the tensors for
measuring its sites. ``plain`` has the interface; ``pair``: gate and up; ``join``: two terms of a
sum; ``grouped``: a mixture's experts; ``fp8``: contiguous along K.
"""

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

#: The first one that takes a program reads its operands.
READINGS = (
    *(GroupedAlternating(), GroupedPair(), GroupedJoin(), Grouped()),
    *(PairedFp8(), Pair(), Fp8(), Join(), Plain()),
)


def reading_of(program: EpilogueProgram, terms: int = 1) -> Plain:
    """The reading for calls of ``program``; ``terms``: the number of products in an accumulator."""
    return next(reading for reading in READINGS if reading.fits(program, terms))


def reading_with(program: EpilogueProgram, variant: str) -> Plain:
    """The reading of a kernel of ``program``. Raises ValueError if none has this ``variant``."""
    for reading in READINGS:
        if variant in reading.variants and reading is reading_of(program, reading.terms):
            return reading
    raise ValueError(f"no reading of {program.key} has a variant {variant!r}")
