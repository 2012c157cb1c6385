# SPDX-License-Identifier: Apache-2.0
"""From a seed to an outcome: what the tests, the hunt and a failure's script have in common."""

import functools

import fuzz_oracle
import fuzz_rounding
from fuzz_oracle import Outcome
from fuzz_program import Program
from fuzz_reduce import reduced
from fuzz_writer import write

#: A reduction asks many times; one that fails by hanging must not cost the whole limit each time.
SHORT = 8


def program_of(mode: str, seed: int) -> Program:
    if mode in ("rounding", "bits"):
        program = write(seed, training=seed % 4 != 0, smooth=True)
        return fuzz_rounding.in_arithmetic(program, seed)
    return write(seed, training=mode == "training" or (mode == "end_to_end" and seed % 2 == 0))


def judged(mode: str, program: Program, limit: float = fuzz_oracle.LIMIT) -> Outcome:
    if mode == "rounding":
        return fuzz_rounding.judge(program, limit=limit)
    if mode == "bits":
        return fuzz_rounding.judge_bits(program, limit=limit)
    if mode == "end_to_end":
        return fuzz_oracle.judge_end_to_end(program)
    return fuzz_oracle.judge(program, limit)


@functools.cache
def outcome(mode: str, seed: int) -> Outcome:
    return judged(mode, program_of(mode, seed))


def report(mode: str, seed: int) -> str:
    """What is wrong with a seed that failed, and a script that shows it, reduced."""
    program, found = program_of(mode, seed), outcome(mode, seed)

    def fails(smaller: Program) -> bool:
        return judged(mode, smaller, SHORT).kind == found.kind

    title = f"{mode} {seed}: {found.failure[:300]}"
    return f"{title}\n{reduced(program, fails, 90).script(title, mode)}"
