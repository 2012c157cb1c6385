# SPDX-License-Identifier: Apache-2.0
"""Is a program legal? This is checked before every use, so that consumers need no checks."""

import keyword
import math

from coda_inductor.errors import ProgramError
from coda_inductor.program.dtypes import FP8, HALF_NAMES
from coda_inductor.program.ir import COMBINES, OF_ROWS, EpilogueProgram
from coda_inductor.program.operands import KINDS
from coda_inductor.program.ops import GEMM_DTYPES, OPERAND_DTYPES, OPS, STORE_DTYPES
from coda_inductor.program.statistics import inconsistent

#: Names a generated kernel uses for itself.
RESERVED = frozenset({"acc", "acc0", "acc1", "D", "C", "c"})


def verify(program: EpilogueProgram) -> EpilogueProgram:
    """Return ``program`` if it is legal.

    Raises:
        ProgramError: the program is not legal; names the first illegal operand, step, store or
            reduction, and why.
    """
    if program.accs not in (("acc",), ("acc0", "acc1")):
        raise ProgramError(f"accumulators must be ('acc',) or ('acc0', 'acc1'), got {program.accs}")
    _factors(program)
    if not program.outputs:
        raise ProgramError("a program needs at least one store or reduction")
    names = set(program.accs)
    _check_operands(program, names)
    _groups(program)
    booleans = _check_steps(program, names)
    routes = {o.name for o in program.operands if o.spec.route}
    _check_outputs(program, names - booleans - routes, names)
    _check_heads(program)
    if (reduce := inconsistent(program)) is not None:
        raise ProgramError(
            f"reduce {reduce.name!r} reads an unrounded value that is stored rounded: "
            "program.consistent() lets it read what is stored"
        )
    return program


def _factors(program: EpilogueProgram) -> None:
    a, b = program.a_dtype, program.b_dtype
    for dtype in (a, b):
        if dtype not in GEMM_DTYPES:
            raise ProgramError(f"GEMM dtype {dtype!r} is not one of {GEMM_DTYPES}")
    if a != b and not (a in FP8 and b in FP8):
        raise ProgramError(f"GEMM dtypes {a!r} and {b!r} differ: only FP8 dtypes may")
    if program.fast and not program.fp8:
        raise ProgramError(f"fast accumulation is for FP8 operands, these are {a}")


def _fresh(name: str, noun: str, names: set[str]) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ProgramError(f"{noun} {name!r} is not a Python identifier")
    if name in names or name in RESERVED:
        raise ProgramError(f"{noun} {name!r} is defined twice or reserved")
    names.add(name)


def _check_operands(program: EpilogueProgram, names: set[str]) -> None:
    for operand in program.operands:
        _fresh(operand.name, "operand", names)
        if operand.kind not in KINDS:
            raise ProgramError(
                f"operand {operand.name!r}: kind {operand.kind!r} is not one of {[*KINDS]}"
            )
        if operand.dtype not in (("int32",) if operand.spec.route else OPERAND_DTYPES):
            raise ProgramError(f"operand {operand.name!r}: dtype {operand.dtype!r} is not legal")
        if program.paired and operand.kind == "tile":
            raise ProgramError(f"operand {operand.name!r}: a paired program reads no tiles")


def _groups(program: EpilogueProgram) -> None:
    kinds = [o.kind for o in program.operands if o.spec.route]
    if program.alternating and not (kinds and program.paired):
        raise ProgramError("columns alternate in grouped programs of two accumulators only")
    if not kinds:
        return
    if "groups" not in kinds or len(set(kinds)) < len(kinds):
        raise ProgramError(f"operands of the kinds {kinds}: one 'groups', and at most one 'index'")
    others = any(o.spec.grouped is None for o in program.operands)
    if program.fp8 or program.head or others:
        raise ProgramError(
            "a grouped program is of 16 bits and more, without heads, tables, batches"
        )
    if any(o.kind == "col" and o.dtype in HALF_NAMES for o in program.operands):
        raise ProgramError("a grouped program reads one value a row in 32 bits")
    if any(reduce.axis == "col" for reduce in program.reduces):
        raise ProgramError("a grouped program has no sums over M: they are a group's")


def _check_steps(program: EpilogueProgram, names: set[str]) -> set[str]:
    """Check the steps. Returns the names of bools."""
    booleans = set()
    for step in program.steps:
        spec = OPS.get(step.op)
        if spec is None and step.op != "swap":
            raise ProgramError(f"step {step.name!r}: unknown op {step.op!r}")
        arity = 3 if spec is None else spec.arity
        if len(step.args) != arity:
            raise ProgramError(
                f"step {step.name!r}: {step.op} takes {arity} arguments, got {len(step.args)}"
            )
        for position, arg in enumerate(step.args):
            if not isinstance(arg, str):
                if isinstance(arg, bool) or math.isnan(arg):
                    raise ProgramError(f"step {step.name!r}: literal {arg!r} is not a number")
                continue
            if arg not in names:
                raise ProgramError(f"step {step.name!r} reads {arg!r} before it is defined")
            wants_bool = step.op.startswith("logical_") or (step.op == "where" and position == 0)
            if wants_bool != (arg in booleans):
                raise ProgramError(
                    f"step {step.name!r}: {step.op} argument {position} must be "
                    f"{'a bool' if wants_bool else 'a number'}, {arg!r} is not"
                )
        if not step.names:
            raise ProgramError(f"step {step.name!r} has only literals: fold it")
        _fresh(step.name, "step", names)
        if spec is not None and spec.boolean:
            booleans.add(step.name)
    return booleans


def _check_outputs(program: EpilogueProgram, numbers: set[str], names: set[str]) -> None:
    for output in program.outputs:
        _fresh(output.name, "output", names)
        if output.value not in numbers:
            raise ProgramError(f"output {output.name!r}: {output.value!r} is not a number here")
    for store in program.stores:
        if store.dtype not in STORE_DTYPES:
            raise ProgramError(f"store {store.name!r}: dtype {store.dtype!r} is not legal")
    lses = [reduce.value for reduce in program.reduces if reduce.combine == "logsumexp"]
    for reduce in program.reduces:
        if reduce.combine == "entropy" and reduce.value not in lses:
            raise ProgramError(f"reduce {reduce.name!r}: there is no logsumexp of its value")
        if reduce.axis not in ("row", "col"):
            raise ProgramError(f"reduce {reduce.name!r}: axis {reduce.axis!r} is not row or col")
        if reduce.combine not in COMBINES:
            raise ProgramError(f"reduce {reduce.name!r}: combine {reduce.combine!r} is not legal")
        if reduce.combine in OF_ROWS and (reduce.axis != "row" or program.paired):
            text = f"{reduce.combine} is over N, of one accumulator"
            raise ProgramError(f"reduce {reduce.name!r}: {text}")


def _check_heads(program: EpilogueProgram) -> None:
    """Check swaps (``program.heads``): kernels can read only accumulators at another column."""
    swaps = [step for step in program.steps if step.op == "swap"]
    tables = [o for o in program.operands if o.kind == "table"]
    if bool(program.head) != bool(swaps or tables):
        count = f"{len(swaps)} swaps, {len(tables)} tables"
        raise ProgramError(f"heads of {program.head} columns in a program with {count}")
    if program.head and (program.paired or program.fp8 or program.reduces):
        raise ProgramError("heads are known of one accumulator, of 16 bits and more, and no sums")
    for step in swaps:
        x, width, distance = step.args[0], *map(float, step.args[1:])
        if x not in program.accs:
            raise ProgramError(f"step {step.name!r}: swap reads {x!r}, which is no accumulator")
        whole = width.is_integer() and distance.is_integer()
        if not whole or not 0 < 2 * distance <= width <= program.head or width % (2 * distance):
            raise ProgramError(
                f"step {step.name!r}: columns {distance!r} apart of the first {width!r} of "
                f"{program.head} are no pairs"
            )
