# SPDX-License-Identifier: Apache-2.0
"""Make programs shorter without changing their meaning: no step twice, and no unread step.

The backward of an op recomputes what its forward computed, so the same sigmoid occurs two or three
times in one epilogue; equal steps become one. Decompositions spell the logistic function as ``1 /
(1 + exp(-x))``; the hardware computes it faster as one operation::

    v0 = neg x;  v1 = exp v0;  v2 = add v1 1.0;  v3 = div a v2      becomes
    v1 = sigmoid x;  v3 = mul a v1
"""

import dataclasses

from coda_inductor.program.ir import EpilogueProgram, Step, Store
from coda_inductor.program.statistics import ROUNDING

#: Ops whose two arguments may be exchanged.
_COMMUTATIVE = {"add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or"}


def simplify(program: EpilogueProgram, *, exact: bool = False) -> EpilogueProgram:
    """Rewrite ``program`` by the identities of this module; operands and outputs stay. ``exact``:
    keep each bit, so that stores round by themselves and functions stay as spelled."""
    by_name = {step.name: step for step in program.steps}
    steps: list[Step] = []
    for step in program.steps:
        steps += (None if exact else _logistic(step, by_name)) or [step]
    stores = tuple(_drop_rounding(store, by_name) if exact else store for store in program.stores)
    program = _merge(dataclasses.replace(program, steps=tuple(steps), stores=stores))
    live = program.sources(output.value for output in program.outputs)
    return dataclasses.replace(program, steps=tuple(s for s in program.steps if s.name in live))


def _drop_rounding(store: Store, by_name: dict[str, Step]) -> Store:
    step = by_name.get(store.value)
    if step is None or step.op != ROUNDING.get(store.dtype):
        return store
    return dataclasses.replace(store, value=str(step.args[0]))


def _merge(program: EpilogueProgram) -> EpilogueProgram:
    """Replace equal steps by the first one. Arguments are renamed first, so one pass merges all."""
    unique: dict[tuple[str, ...], Step] = {}
    names: dict[str, str] = {}
    for step in program.steps:
        args = tuple(names.get(a, a) if isinstance(a, str) else a for a in step.args)
        # Numbers are compared as text: 0.0 equals -0.0, but dividing by them does not.
        operands = [a if isinstance(a, str) else f"number {float(a)!r}" for a in args]
        if step.op in _COMMUTATIVE:
            operands.sort()
        first = unique.setdefault((step.op, *operands), dataclasses.replace(step, args=args))
        names[step.name] = first.name

    def rename(output):
        return dataclasses.replace(output, value=names.get(output.value, output.value))

    stores, reduces = (tuple(map(rename, each)) for each in (program.stores, program.reduces))
    steps = tuple(unique.values())
    return dataclasses.replace(program, steps=steps, stores=stores, reduces=reduces)


def _logistic(step: Step, by_name: dict[str, Step]) -> list[Step] | None:
    """A / (1 + exp(-x)) as a * sigmoid(x), 1 / (1 + exp(-x)) as sigmoid(x); else None."""
    if step.op == "div":
        numerator, denominator = step.args
    elif step.op == "reciprocal":
        numerator, denominator = 1.0, step.args[0]
    else:
        return None
    x = _argument_of_logistic(denominator, by_name)
    if x is None:
        return None
    if numerator == 1.0:
        return [dataclasses.replace(step, op="sigmoid", args=(x,))]
    name = f"{step.name}s"
    sigmoid = dataclasses.replace(step, name=name, op="sigmoid", args=(x,))
    return [sigmoid, dataclasses.replace(step, op="mul", args=(numerator, name))]


def _argument_of_logistic(value: str | float, by_name: dict[str, Step]) -> str | None:
    """The value x if ``value`` is 1 + exp(-x), else None."""
    add = by_name.get(value) if isinstance(value, str) else None
    if add is None or add.op != "add" or 1.0 not in add.args:
        return None
    exp = next((by_name[a] for a in add.names if a in by_name), None)
    if exp is None or exp.op != "exp":
        return None
    neg = by_name.get(exp.args[0]) if isinstance(exp.args[0], str) else None
    if neg is None or neg.op != "neg" or not isinstance(neg.args[0], str):
        return None
    return neg.args[0]
