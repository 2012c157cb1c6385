# SPDX-License-Identifier: Apache-2.0
"""The scales of a product's operands, which an unfused FP8 GEMM applies itself.

``aten._scaled_mm`` computes ``acc * inv_a * inv_b``, with one value per row, per column or for all,
before it rounds. So a kernel of ours saves nothing there::

    x = mul acc r           r: col         scaled(program)["acc"].value == "y"
    y = mul x w             w: row         .col == "r", .row == "w"
"""

import functools
from dataclasses import dataclass

from coda_inductor.program.ir import EpilogueProgram


@dataclass(frozen=True)
class Scaled:
    """A product with its scales: the value after all of them, the steps that multiply by them, and
    at most two operands, of the kinds col, row and scalar."""

    value: str
    steps: tuple[str, ...] = ()
    col: str | None = None
    row: str | None = None
    scalars: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all operands that are scales."""
        return tuple(name for name in (self.col, self.row, *self.scalars) if name is not None)


@functools.lru_cache(maxsize=4096)
def scaled(program: EpilogueProgram) -> dict[str, Scaled]:
    """For each accumulator, the part of ``program`` that an unfused GEMM computes."""
    return {acc: _scaled(program, acc) for acc in program.accs}


def _scaled(program: EpilogueProgram, acc: str) -> Scaled:
    kinds = {o.name: o.kind for o in program.operands if o.dtype == "float32"}
    names: dict[str, list[str]] = {"col": [], "row": [], "scalar": []}
    value, steps = acc, []
    while program.fp8 and not any(output.value == value for output in program.outputs):
        readers = [step for step in program.steps if value in step.args]
        if len(readers) != 1 or readers[0].op != "mul":
            break
        (scale,) = [a for a in readers[0].args if a != value] or (value,)
        kind = kinds.get(str(scale))
        # One scale per operand: further factors of rows or columns are not scales.
        if kind is None or kind not in names or (kind != "scalar" and names[kind]):
            break
        if sum(map(len, names.values())) > 1:
            break
        names[kind].append(str(scale))
        value = readers[0].name
        steps.append(value)
    col, row = (next(iter(names[kind]), None) for kind in ("col", "row"))
    return Scaled(value, tuple(steps), col, row, tuple(names["scalar"]))
