# SPDX-License-Identifier: Apache-2.0
"""Is a program legal? This is checked before every use, so that consumers need no checks."""

import keyword
import math
from collections.abc import Generator, Iterator

from coda_inductor.errors import ProgramError
from coda_inductor.program.dtypes import FP8, HALF_NAMES
from coda_inductor.program.ir import COMBINES, OF_ROWS, EpilogueProgram
from coda_inductor.program.operands import KINDS
from coda_inductor.program.ops import GEMM_DTYPES, OPERAND_DTYPES, OPS
from coda_inductor.program.statistics import inconsistent

#: Names a generated kernel uses for itself.
RESERVED = frozenset({"acc", "acc0", "acc1", "D", "C", "c"})


def verify(program: EpilogueProgram, *, eager: bool = False) -> EpilogueProgram:
    """Return ``program`` if it is legal. ``eager``: it rounds where eager rounds; there a reduction
    may read a float32 value of which a rounded copy is stored.

    Raises:
        ProgramError: it is not legal; names the first illegal operand, step, store or reduction.
    """
    if (why := next(_problems(program, eager), None)) is not None:
        raise ProgramError(why)
    return program


def _problems(program: EpilogueProgram, eager: bool) -> Iterator[str]:
    """What is wrong, in an order in which each check may rely on the ones before it."""
    if program.accs not in (("acc",), ("acc0", "acc1")):
        yield f"accumulators must be ('acc',) or ('acc0', 'acc1'), got {program.accs}"
    yield from _factors(program)
    if not program.outputs:
        yield "a program needs at least one store or reduction"
    names = set(program.accs)
    yield from _operands(program, names)
    yield from _groups(program)
    booleans = yield from _steps(program, names)
    routes = {o.name for o in program.operands if o.spec.route}
    yield from _outputs(program, names - booleans - routes, names)
    yield from _heads(program)
    if not eager and (reduce := inconsistent(program)) is not None:
        text = f"reduce {reduce.name!r} reads an unrounded value that is stored rounded: "
        yield f"{text}program.consistent() lets it read what is stored"


def _factors(program: EpilogueProgram) -> Iterator[str]:
    a, b = program.a_dtype, program.b_dtype
    for dtype in (a, b):
        if dtype not in GEMM_DTYPES:
            yield f"GEMM dtype {dtype!r} is not one of {GEMM_DTYPES}"
    if a != b and not (a in FP8 and b in FP8):
        yield f"GEMM dtypes {a!r} and {b!r} differ: only FP8 dtypes may"
    if program.fast and not program.fp8:
        yield f"fast accumulation is for FP8 operands, these are {a}"


def _fresh(name: str, noun: str, names: set[str]) -> Iterator[str]:
    if not name.isidentifier() or keyword.iskeyword(name):
        yield f"{noun} {name!r} is not a Python identifier"
    if name in names or name in RESERVED:
        yield f"{noun} {name!r} is defined twice or reserved"
    names.add(name)


def _operands(program: EpilogueProgram, names: set[str]) -> Iterator[str]:
    for operand in program.operands:
        yield from _fresh(operand.name, "operand", names)
        label = f"operand {operand.name!r}"
        if operand.kind not in KINDS:
            yield f"{label}: kind {operand.kind!r} is not one of {[*KINDS]}"
        if operand.dtype not in (("int32",) if operand.spec.route else OPERAND_DTYPES):
            yield f"{label}: dtype {operand.dtype!r} is not legal"
        if program.paired and operand.kind == "tile":
            yield f"{label}: a paired program reads no tiles"


def _groups(program: EpilogueProgram) -> Iterator[str]:
    kinds = [o.kind for o in program.operands if o.spec.route]
    if program.alternating and not (kinds and program.paired):
        yield "columns alternate in grouped programs of two accumulators only"
    if not kinds:
        return
    if "groups" not in kinds or len(set(kinds)) < len(kinds):
        yield f"operands of the kinds {kinds}: one 'groups', and at most one 'index'"
    others = any(o.spec.grouped is None for o in program.operands)
    if program.fp8 or program.head or others:
        yield "a grouped program is of 16 bits and more, without heads, tables, batches"
    if any(o.kind == "col" and o.dtype in HALF_NAMES for o in program.operands):
        yield "a grouped program reads one value a row in 32 bits"
    if any(reduce.axis == "col" for reduce in program.reduces):
        yield "a grouped program has no sums over M: they are a group's"


def _steps(program: EpilogueProgram, names: set[str]) -> Generator[str, None, set[str]]:
    booleans = set()
    for step in program.steps:
        spec, label = OPS.get(step.op), f"step {step.name!r}"
        if spec is None and step.op != "swap":
            yield f"{label}: unknown op {step.op!r}"
        arity = 3 if spec is None else spec.arity
        if len(step.args) != arity:
            yield f"{label}: {step.op} takes {arity} arguments, got {len(step.args)}"
        for position, arg in enumerate(step.args):
            if not isinstance(arg, str):
                if isinstance(arg, bool) or math.isnan(arg):
                    yield f"{label}: literal {arg!r} is not a number"
                continue
            if arg not in names:
                yield f"{label} reads {arg!r} before it is defined"
            wants_bool = step.op.startswith("logical_") or (step.op == "where" and position == 0)
            if wants_bool != (arg in booleans):
                kind = "a bool" if wants_bool else "a number"
                yield f"{label}: {step.op} argument {position} must be {kind}, {arg!r} is not"
        if not step.names:
            yield f"{label} has only literals: fold it"
        yield from _fresh(step.name, "step", names)
        if spec is not None and spec.boolean:
            booleans.add(step.name)
    return booleans


def _outputs(program: EpilogueProgram, numbers: set[str], names: set[str]) -> Iterator[str]:
    for output in program.outputs:
        yield from _fresh(output.name, "output", names)
        if output.value not in numbers:
            yield f"output {output.name!r}: {output.value!r} is not a number here"
    for store in program.stores:
        if store.dtype not in OPERAND_DTYPES:
            yield f"store {store.name!r}: dtype {store.dtype!r} is not legal"
    lses = [reduce.value for reduce in program.reduces if reduce.combine == "logsumexp"]
    for reduce in program.reduces:
        label = f"reduce {reduce.name!r}"
        if reduce.combine == "entropy" and reduce.value not in lses:
            yield f"{label}: there is no logsumexp of its value"
        if reduce.axis not in ("row", "col"):
            yield f"{label}: axis {reduce.axis!r} is not row or col"
        if reduce.combine not in COMBINES:
            yield f"{label}: combine {reduce.combine!r} is not legal"
        if reduce.combine in OF_ROWS and (reduce.axis != "row" or program.paired):
            yield f"{label}: {reduce.combine} is over N, of one accumulator"


def _heads(program: EpilogueProgram) -> Iterator[str]:
    """Check swaps (``reference.swap``): kernels can read only accumulators at another column."""
    head, swaps = program.head, [step for step in program.steps if step.op == "swap"]
    tables = [o for o in program.operands if o.kind == "table"]
    if bool(head) != bool(swaps or tables):
        count = f"{len(swaps)} swaps, {len(tables)} tables"
        yield f"heads of {head} columns in a program with {count}"
    if head and (program.paired or program.fp8 or program.reduces):
        yield "heads are known of one accumulator, of 16 bits and more, and no sums"
    for step in swaps:
        x, width, distance = step.args[0], *map(float, step.args[1:])
        if x not in program.accs:
            yield f"step {step.name!r}: swap reads {x!r}, which is no accumulator"
        whole = width.is_integer() and distance.is_integer()
        if not whole or not 0 < 2 * distance <= width <= head or width % (2 * distance):
            pairs = f"columns {distance!r} apart of the first {width!r} of {head}"
            yield f"step {step.name!r}: {pairs} are no pairs"
