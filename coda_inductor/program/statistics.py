# SPDX-License-Identifier: Apache-2.0
"""Compute statistics from values as they are stored.

A value that is stored in 16 bits is rounded; a reduction of it on the tile is not. Where a later
kernel combines the two, the difference can dominate: a confident token's ``exp(logit - lse) - 1``
was only the rounding error of its logit (30 % of the loss's gradient at a loss of 0.045). Unfused
code normalizes rounded values, so a program does too::

    store out0 = acc : bfloat16                store out0 = acc : bfloat16
    reduce part0 = logsumexp over N of acc     acc_r = round_bfloat16 acc
                                               reduce part0 = logsumexp over N of acc_r

A value stored in float32 is not changed, even if it is computed from one that is stored rounded:
the gradient of a row's maximum searches for it among the stored values. ``verify`` refuses a
reduction over a row that reads an unrounded value.
"""

import dataclasses
from collections.abc import Collection, Mapping

from coda_inductor.program.dtypes import HALF_NAMES
from coda_inductor.program.ir import EpilogueProgram, Reduce, Step

#: Store dtype -> the op that rounds to it.
ROUNDING = {dtype: f"round_{dtype}" for dtype in HALF_NAMES}


def consistent(
    program: EpilogueProgram, exact: Collection[str] = (), seen: Mapping[str, str] | None = None
) -> EpilogueProgram:
    """``program`` with reductions that read stored values after rounding, as they are in memory.
    ``exact`` names reductions whose result is never combined with the stored values (a bias's
    gradient); they stay more exact. ``seen``: values that count as stored, and their dtypes."""
    rounds = _Rounding(program, seen or {})
    reduces = tuple(
        reduce if reduce.name in exact else dataclasses.replace(reduce, value=rounds(reduce.value))
        for reduce in program.reduces
    )
    steps = (*program.steps, *rounds.steps)
    return dataclasses.replace(program, steps=steps, reduces=reduces)


def inconsistent(program: EpilogueProgram) -> Reduce | None:
    """The first reduction over N whose input is stored in 16 bits but reduced in float32; None if
    there is no such reduction."""
    rounding = _Rounding(program)
    rows = (reduce for reduce in program.reduces if reduce.axis == "row")
    return next((reduce for reduce in rows if rounding(reduce.value) != reduce.value), None)


class _Rounding:
    """Maps a value to the same value, computed from rounded stored values."""

    def __init__(self, program: EpilogueProgram, seen: Mapping[str, str] | None = None):
        self.steps: list[Step] = []  # the steps for that
        self._by_name = {step.name: step for step in program.steps}
        self._cache: dict[str, str] = {}
        self._stored = {s.value: ROUNDING[s.dtype] for s in program.stores if s.dtype in ROUNDING}
        #: Values that are stored unrounded, whatever they were computed from.
        self._exact = {s.value for s in program.stores} - self._stored.keys()
        for value, dtype in (seen or {}).items():
            if value not in self._exact and dtype in ROUNDING:
                self._stored.setdefault(value, ROUNDING[dtype])

    def __call__(self, value: str) -> str:
        # Not recursive: a chain of elementwise steps may be longer than Python's stack.
        todo = [value]
        while todo:
            top = todo[-1]
            step = self._by_name.get(top)
            names = () if step is None or self._ends_at(top, step) else step.names
            if missing := [a for a in names if a not in self._cache]:
                todo += missing
                continue
            todo.pop()
            if top not in self._cache:
                self._cache[top] = self._round(top, step)
        return self._cache[value]

    def _ends_at(self, value: str, step: Step) -> bool:
        return value in self._stored or value in self._exact or step.op in ROUNDING.values()

    def _round(self, value: str, step: Step | None) -> str:
        if (op := self._stored.get(value)) is not None:
            # A program that rounds already does not change: rounding twice is rounding once.
            rounds = step is not None and step.op == op
            return value if rounds else self._put(value, op, (value,), "as stored")
        if step is None or self._ends_at(value, step):
            return value
        args = tuple(self._cache[a] if isinstance(a, str) else a for a in step.args)
        return value if args == step.args else self._put(value, step.op, args, step.origin)

    def _put(self, value: str, op: str, args: tuple[str | float, ...], origin: str) -> str:
        self.steps.append(Step(f"{value}_r", op, args, origin))
        return f"{value}_r"
