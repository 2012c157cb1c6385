# SPDX-License-Identifier: Apache-2.0
"""How an EpilogueProgram maps onto the operands and outputs of a GEMM kernel. Pure analysis.

A QuACK kernel has one C operand and one D output with a pipeline of their own, any number of
further tile loads and stores, vector loads, and per-tile reductions ("sinks"). This module decides
which operand becomes C, which store becomes D, which reductions fold a product as one fused
multiply-add, and which of them need their out-of-bounds lanes masked.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from coda_inductor.program import EpilogueProgram, Reduce, Step, Store
from coda_inductor.program.dtypes import HALF_NAMES
from coda_inductor.program.statistics import ROUNDING

#: Ops that map zeros to zero, whatever their literal arguments are.
_ZERO_ALL = frozenset({"add", "sub", "maximum", "minimum"})
_ROUNDING = frozenset(ROUNDING.values())
_ZERO_UNARY = _ROUNDING | {"neg", "abs", "sqrt", "tanh", "erf", "sin", "relu", "log1p", "expm1"}
#: Ops that cannot make an infinity or NaN out of zeros and values of ordinary size.
_BOUNDED = _ZERO_ALL | _ZERO_UNARY - {"sqrt", "log1p", "expm1"} | {"mul", "sigmoid", "cos"}


@dataclass(frozen=True)
class Sink(Reduce):
    """A reduction as a kernel computes it. ``factors`` names the two values whose product is folded
    by one multiply-add, or None. ``masked``: lanes beyond the matrix get the neutral element."""

    factors: tuple[str, str] | None = None
    masked: bool = False


@dataclass(frozen=True)
class Ports:
    """The role of each operand and store. ``c``: the tile operand that is the GEMM's C. ``d``: the
    store that is D (None if paired, with half the GEMM's columns a store). ``aux``: the others."""

    c: str | None
    d: Store | None
    aux: tuple[Store, ...]
    sinks: tuple[Sink, ...]
    #: Values that are the same for the whole tile (they depend on scalars only).
    uniform: frozenset[str]
    #: Steps across the columns of a head, which are operands to the function of one element, and
    #: their launch arguments: numbers.
    across: tuple[Step, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)


@functools.lru_cache(maxsize=1024)
def ports(program: EpilogueProgram) -> Ports:
    """The roles of operands and stores of ``program``, a legal program (``program.verify``)."""
    uniform = _uniform(program)
    tiles = [o for o in program.operands if o.kind == "tile" and o.dtype in HALF_NAMES]
    across = tuple(step for step in program.steps if step.op == "swap")
    sinks = []
    for reduce in program.reduces:
        masked = reduce.combine == "add" and reduce.value not in _zeros(program, reduce.axis)
        factors = None if masked else _factors(program, reduce, uniform)
        sinks.append(Sink(**vars(reduce), factors=factors, masked=masked))
    return Ports(
        c=tiles[0].name if tiles else None,
        d=None if program.paired or not program.stores else program.stores[0],
        aux=program.stores if program.paired else program.stores[1:],
        sinks=tuple(sinks),
        uniform=uniform,
        across=across,
        numbers={step.name: program.head for step in across},
    )


def _uniform(program: EpilogueProgram) -> frozenset[str]:
    names = {o.name for o in program.operands if o.kind == "scalar"}
    for step in program.steps:
        if names.issuperset(step.names):
            names.add(step.name)
    return frozenset(names)


def _factors(program, reduce, uniform) -> tuple[str, str] | None:
    """The factors of ``reduce.value`` if it is a product with no other reader; else None."""
    if reduce.combine != "add" or program.paired:
        return None
    step = next((s for s in program.steps if s.name == reduce.value), None)
    if step is None or step.op != "mul" or any(reduce.value in s.args for s in program.steps):
        return None
    if sum(o.value == reduce.value for o in program.outputs) > 1:
        return None
    if any(not isinstance(a, str) or a in uniform for a in step.args):
        return None
    return step.args


def _zeros(program: EpilogueProgram, axis: str) -> set[str]:
    """The values that are zero in the lanes beyond the matrix along the reduced axis. There,
    accumulators and tile operands are zero (TMA fills with zeros), but vectors along that axis hold
    whatever shared memory held before: a row vector for sums over N, a column vector for sums over
    M. The other vectors and the scalars are valid there, so a zero times them stays zero unless
    they are not finite, in which case the sum is not finite anyway."""
    along = {"row": "N", "col": "M"}[axis]
    zeros = set(program.accs) | {o.name for o in program.operands if o.kind == "tile"}
    valid = {o.name for o in program.operands if o.spec.dims != "MN" and along not in o.spec.dims}
    for step in program.steps:
        names = step.names
        literals = [a for a in step.args if not isinstance(a, str)]
        if all(n in zeros for n in names):
            keeps = (
                step.op in _ZERO_UNARY
                or (step.op in _ZERO_ALL and all(v == 0 for v in literals))
                or step.op == "mul"
                or (step.op == "div" and step.args[0] in zeros and literals and literals[0] != 0)
            )
            if keeps:
                zeros.add(step.name)
                continue
        finite = all(n in zeros or n in valid for n in names)
        if step.op == "mul" and finite and any(n in zeros for n in names):
            zeros.add(step.name)
        elif all(n in valid for n in names) or (finite and step.op in _BOUNDED):
            valid.add(step.name)
    return zeros
