# SPDX-License-Identifier: Apache-2.0
"""The tensors that a program reads beside A and B, and the record of each kind of them.

All differences between kinds are in :data:`KINDS`. The reference, the kernels' arguments and shared
memory, and the tuner's inputs follow from the dimensions: M and N; H, the columns of a head; B,
equal parts of M, with ``ir.LEAST_PART`` rows at least; E, the groups of a grouped program.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """A kind of operand: how it covers the M x N tile.

    Attributes:
        letter: the first letter of the operands' names.
        dims: the operand's dimensions. Columns of a paired program alternate in the kernel, so that
            an operand with N, but without M, has every value twice: 2N.
        grouped: the dimensions in a grouped program; None if such a program cannot read it.
        staged: does it pass through shared memory as tiles do?
        route: does it say which rows are multiplied? Then it is int32, and no step reads it.
        sample: converts values of a normal distribution to the values of a measurement.
    """

    letter: str
    dims: str
    grouped: str | None
    staged: bool = False
    route: bool = False
    sample: Callable[[Tensor], Tensor] = lambda x: x

    @property
    def columns(self) -> bool:
        """Is it a column vector, or several?"""
        return "N" in self.dims and "M" not in self.dims

    def shape(self, sizes: Mapping[str, Any], *, grouped: bool) -> tuple[Any, ...]:
        """The operand's shape if dimensions have these ``sizes``."""
        dims = self.grouped if grouped else self.dims
        assert dims is not None, "the program is legal"
        return tuple(sizes[dim] for dim in dims)

    def resident(self, tile_m: int, tile_n: int) -> int:
        """The number of its values in shared memory. Rows of a tile cover two parts at most."""
        if self.staged or self.route or not self.dims:
            return 0
        return math.prod({"M": tile_m, "N": tile_n, "B": 2}[dim] for dim in self.dims)


KINDS = {
    "tile": Kind("t", "MN", "MN", staged=True),
    "row": Kind("w", "N", "EN", sample=lambda x: 1 + 0.1 * x),
    "col": Kind("r", "M", "M", sample=lambda x: 0.5 + x.abs()),  # statistics are positive
    "scalar": Kind("s", "", "", sample=torch.ones_like),
    "table": Kind("h", "MH", None, staged=True, sample=lambda x: x.clamp(-1, 1)),
    "batch": Kind("b", "BN", None, sample=lambda x: 1 + 0.1 * x),
    # The first row of each group, and the end; the row of A for each row.
    "groups": Kind("g", "E", "E", route=True),
    "index": Kind("i", "M", "M", route=True),
}
#: Kinds that no step reads.
ROUTES = tuple(name for name, kind in KINDS.items() if kind.route)


@dataclass(frozen=True)
class Operand:
    """A tensor that the epilogue reads. ``dtype`` is a torch dtype name, e.g. ``"bfloat16"``."""

    name: str
    kind: str
    dtype: str

    @property
    def spec(self) -> Kind:
        """The record of the operand's kind."""
        return KINDS[self.kind]

    @property
    def kernel_dtype(self) -> str:
        """The dtype in which kernels take the operand."""
        return self.dtype if self.spec.dims else "float32"
