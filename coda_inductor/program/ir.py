# SPDX-License-Identifier: Apache-2.0
"""EpilogueProgram: a small frozen SSA program over one GEMM accumulator tile.

The program describes the work on ``acc = A @ B`` (A is M x K, B is K x N) before the tile leaves
the chip, with the five primitives of the CODA paper (arXiv 2605.19269, section 4): elementwise
steps, vector loads (row or column broadcast), tile loads and stores, block reductions. It never
mentions the mainloop, the tile size or the graph it came from. A and B may have different dtypes if
both are FP8; values on the tile are float32 in any case.

A *paired* program has two accumulators, ``acc0 = A @ B0`` and ``acc1 = A @ B1`` with B0 and B1 of
one shape: gate and up projections in one tile (rule R6 of the design). A *grouped* program
multiplies rows by the B of their group, an expert: it has an operand of the kind "groups", and one
of the kind "index" if its rows are gathered from A (``ROUTES``). In a program with a ``head``, N
consists of heads with ``head`` columns each (``reference.swap``).

Example, the o_proj GEMM of a Llama layer (residual + RMSNorm statistics + deferred gamma)::

    program(acc: bfloat16 x bfloat16)
      load  c0      : tile bfloat16
      load  w0      : row bfloat16
      x     = add acc c0          # aten.add.Tensor
      h     = mul x w0            # aten.mul.Tensor
      x_r   = round_bfloat16 x    # as stored
      sq    = mul x_r x_r         # aten.mul.Tensor
      store out0    = x : bfloat16
      store out1    = h : bfloat16
      reduce part0  = add over N of sq
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from coda_inductor.errors import ProgramError
from coda_inductor.program.dtypes import FP8, FP8_PRODUCT
from coda_inductor.program.operands import ROUTES, Operand

#: Combinations of reductions that exist over N alone.
OF_ROWS = ("logsumexp", "entropy")
COMBINES = ("add", "max", *OF_ROWS)
#: No tile of a kernel has more rows, so that it is in two parts of a batch at the most.
LEAST_PART = 256


@dataclass(frozen=True)
class Step:
    """``name = op(*args)``. An argument is an SSA name or a literal. ``origin`` is the graph op
    that the step comes from; it is for readers only and not part of the program's identity."""

    name: str
    op: str
    args: tuple[str | float, ...]
    origin: str = ""

    @property
    def names(self) -> list[str]:
        """The arguments that are not literals."""
        return [a for a in self.args if isinstance(a, str)]


@dataclass(frozen=True)
class Store:
    """An (M, N) output: ``value`` converted to ``dtype``."""

    name: str
    value: str
    dtype: str


@dataclass(frozen=True)
class Reduce:
    """A reduction of ``value`` that leaves the kernel as float32 partials, one per tile (rule R2).
    ``axis="row"`` reduces along N: partials are (M, n_tiles). ``axis="col"`` reduces along M:
    partials are (m_tiles, N). ``combine`` is one of ``COMBINES``."""

    name: str
    value: str
    axis: str = "row"
    combine: str = "add"

    @property
    def dim(self) -> int:
        """The dimension of the tile along which values are reduced."""
        return 1 if self.axis == "row" else 0


@dataclass(frozen=True)
class EpilogueProgram:
    """An epilogue program, see the module docstring. Check it with
    :mod:`coda_inductor.program.verify`."""

    accs: tuple[str, ...]
    a_dtype: str
    operands: tuple[Operand, ...] = ()
    steps: tuple[Step, ...] = ()
    stores: tuple[Store, ...] = ()
    reduces: tuple[Reduce, ...] = ()
    #: "" stands for ``a_dtype``.
    b_dtype: str = ""
    #: FP8 only: may the multiplier's own accumulator, with less than 32 bits, sum over all of K?
    #: This is a permission: kernels may be more exact.
    fast: bool = False
    #: Columns of an attention head; N is a multiple of them. 0 for programs that ignore heads.
    head: int = 0
    #: Grouped pairs only: are the accumulators the even and odd columns of A @ B, B (E, K, 2N)?
    alternating: bool = False

    def __post_init__(self) -> None:
        if not self.b_dtype:
            object.__setattr__(self, "b_dtype", self.a_dtype)

    @property
    def fp8(self) -> bool:
        """Do A and B have 8 bits?"""
        return self.a_dtype in FP8

    @property
    def product_dtype(self) -> str:
        """The dtype to which an unfused GEMM rounds its product."""
        return FP8_PRODUCT if self.fp8 else self.a_dtype

    @property
    def loads(self) -> tuple[Operand, ...]:
        """The operands that are staged through shared memory like tiles: tiles, and tables."""
        return tuple(o for o in self.operands if o.spec.staged)

    @property
    def read(self) -> tuple[Operand, ...]:
        """The operands that steps and stores may read."""
        return tuple(o for o in self.operands if not o.spec.route)

    @property
    def routes(self) -> tuple[int | None, int | None]:
        """The positions of "groups" and "index" among the operands; None for a missing one."""
        kinds = [o.kind for o in self.operands]
        groups, index = (kinds.index(kind) if kind in kinds else None for kind in ROUTES)
        return groups, index

    @property
    def grouped(self) -> bool:
        """Is every row of A multiplied by the B of its group?"""
        return self.routes[0] is not None

    def rows(self, as_: Sequence[Any], operands: Sequence[Any]) -> Any:
        """The M of a call."""
        index = self.routes[1]
        return (as_[0] if index is None else operands[index]).shape[0]

    def columns(self, bs: Sequence[Any]) -> int:
        """The N of a call. In a grouped pair, one of ``bs`` may have the columns of both."""
        return bs[0].shape[-1] // (len(self.accs) if len(bs) < len(self.accs) else 1)

    def sizes(self, m: Any, n: Any, groups: int) -> dict[str, Any]:
        """The sizes of the dimensions of operands (``operands``) in an example with two parts."""
        return {"M": m, "N": n, "H": self.head, "B": 2, "E": groups}

    def too_thin(self, m: Any, operands: Sequence[Any]) -> bool:
        """Does a part of a batch have fewer rows than the largest tile, so that no kernel may run?
        With symbolic sizes, only a call can tell."""
        pairs = zip(self.operands, operands, strict=True)
        parts = [x.shape[0] for operand, x in pairs if "B" in operand.spec.dims]
        return any(n > 1 and m < n * LEAST_PART for n in parts)

    @property
    def paired(self) -> bool:
        return len(self.accs) == 2

    def sources(self, values: Iterable[str]) -> set[str]:
        """``values``, and all values that they are computed from."""
        names = set(values)
        for step in reversed(self.steps):
            if step.name in names:
                names.update(step.names)
        return names

    @property
    def outputs(self) -> tuple[Store | Reduce, ...]:
        """The results of one run, in order: the stores, then the partials of the reductions."""
        return (*self.stores, *self.reduces)

    def lse_of(self, entropy: Reduce) -> Reduce:
        """The log-sum-exp of the value of ``entropy``, by which tiles are combined (rule R7)."""
        key = (entropy.value, "logsumexp")
        return next(r for r in self.reduces if (r.value, r.combine) == key)

    def to_json(self) -> str:
        start = {"format": _FORMAT, "accs": self.accs, "a_dtype": self.a_dtype}
        return self._as_text(start | {"b_dtype": self.b_dtype, "fast": self.fast})

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def from_json(text: str) -> "EpilogueProgram":
        """Inverse of :meth:`to_json`."""
        body = json.loads(text)
        if (found := body.pop("format", None)) != _FORMAT:
            raise ProgramError(
                f"program format {found!r} is not {_FORMAT}: it was serialized by another version "
                "of coda_inductor; clear torch's compile cache (TORCHINDUCTOR_CACHE_DIR)"
            )
        lists: dict[str, Any] = {
            "accs": tuple(body["accs"]),
            "operands": tuple(Operand(*o) for o in body["operands"]),
            "steps": tuple(
                Step(n, op, tuple(args), origin) for n, op, args, origin in body["steps"]
            ),
            "stores": tuple(Store(*s) for s in body["stores"]),
            "reduces": tuple(Reduce(*r) for r in body["reduces"]),
        }
        return EpilogueProgram(**body | lists)

    def _as_text(self, start: dict[str, object]) -> str:
        body = start | ({"head": self.head} if self.head else {})
        body |= {"alternating": True} if self.alternating else {}
        for name in ("operands", "steps", "stores", "reduces"):
            body[name] = [dataclasses.astuple(item) for item in getattr(self, name)]
        return json.dumps(body, separators=(",", ":"))

    @functools.cached_property
    def key(self) -> str:
        """The program's identity: equal for programs that compute the same, from any graph."""
        steps = tuple(dataclasses.replace(step, origin="") for step in self.steps)
        # Shipped measurements have it as their key, so programs from before FP8 keep theirs.
        start: dict[str, object] = {"format": 1, "accs": self.accs, "in_dtype": self.a_dtype}
        if self.fp8 or self.b_dtype != self.a_dtype:
            start |= {"b_dtype": self.b_dtype, "fast": self.fast}
        text = dataclasses.replace(self, steps=steps)._as_text(start)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        factors = " | ".join(f"{acc}: {self.a_dtype} x {self.b_dtype}" for acc in self.accs)
        lines = [f"program({factors})" + ", fast accumulation" * self.fast]
        lines[0] += f", heads of {self.head}" if self.head else ""
        lines[0] += ", of alternating columns" * self.alternating
        lines += [f"  load   {o.name:<8}: {o.kind} {o.dtype}" for o in self.operands]
        for s in self.steps:
            args = " ".join(a if isinstance(a, str) else repr(a) for a in s.args)
            comment = f"# {s.origin}" if s.origin else ""
            lines.append(f"  {s.name:<6} = {f'{s.op} {args}':<28} {comment}".rstrip())
        lines += [f"  store  {s.name:<8}= {s.value} : {s.dtype}" for s in self.stores]
        over = {"row": "N", "col": "M"}
        lines += [
            f"  reduce {r.name:<8}= {r.combine} over {over.get(r.axis, r.axis)} of {r.value}"
            for r in self.reduces
        ]
        return "\n".join(lines)


_FORMAT = 2  # bump when the meaning of the serialized form changes
