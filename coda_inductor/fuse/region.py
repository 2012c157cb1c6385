# SPDX-License-Identifier: Apache-2.0
"""A region: one GEMM, or several that share a tile, and the nodes that its epilogue absorbs.

Nothing here changes a graph: :mod:`coda_inductor.fuse.grow` fills regions, ``emit`` puts them in.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.graph.gemms import fast_accumulation, gemm_inputs, routes_of
from coda_inductor.graph.nodes import fake, renames, renames_or_casts
from coda_inductor.graph.sizes import same
from coda_inductor.graph.vocabulary import Value
from coda_inductor.graph.walk import base, closure, readers
from coda_inductor.kernels import joinable
from coda_inductor.program import OPS, EpilogueProgram, consistent, simplify, verify
from coda_inductor.program.dtypes import HALF, dtype_name
from coda_inductor.program.ir import OF_ROWS, Reduce, Step, Store
from coda_inductor.program.operands import KINDS, Operand
from coda_inductor.program.statistics import ROUNDING
from coda_inductor.refusal import Refusal

#: The kind of an operand with one value per column, which a swap reads at the other column.
SWAPPED = "swapped row"


@dataclass
class Region:
    """One or more GEMMs and the nodes that their epilogue absorbs, in graph order.

    Attributes:
        anchors: the GEMM; or the two of a pair, each with an accumulator; or the terms of a sum.
        total: the node that adds the terms of a sum; None if the anchors are not a sum.
        values: absorbed nodes, the anchors included, and their values in the program.
        copies: nodes of which the tile computes a copy, while the originals stay for other readers.
        operands: the tensors that are read, each with its kind: one of ``KINDS``, or ``SWAPPED``.
        lanes: the only readers of the one anchor: they select its even (0) or its odd (1) columns,
            each an accumulator.
        heads: for a region that swaps columns within heads: columns per head, how many of these it
            swaps, and the distance of the two columns of a pair (``reference.swap``).
        eager: does each node round its value to its dtype, as eager does?
    """

    anchors: tuple[Node, ...]
    total: Node | None = None
    values: dict[Node, Value] = field(default_factory=dict)
    copies: dict[Node, Value] = field(default_factory=dict)
    operands: dict[tuple[Node, str], Operand] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    reduces: dict[Node, Reduce] = field(default_factory=dict)
    refusals: dict[Node, Refusal] = field(default_factory=dict)
    heads: tuple[int, int, int] | None = None
    lanes: dict[Node, int] = field(default_factory=dict)
    eager: bool = False

    @property
    def shape(self) -> tuple[Any, int, int]:
        """(M, N, K); for a sum, K is the total of all terms."""
        terms = self.anchors if self.total is not None else self.anchors[:1]
        k = sum(fake(gemm_inputs(term)[0]).shape[1] for term in terms)
        m, n = fake(self.anchors[0]).shape
        return m, n // 2 if self.lanes else n, k

    @property
    def in_place(self) -> bool:
        """Are the anchors terms of a sum that one kernel reads in place?"""
        return self.total is not None and in_place(self.anchors)

    @property
    def grouped(self) -> bool:
        """Does every row have the B of its group?"""
        return routes_of(self.anchors[0])[0] is not None

    @property
    def accs(self) -> tuple[str, ...]:
        paired = self.total is None and len(self.anchors) == 2
        return ("acc0", "acc1") if paired or self.lanes else ("acc",)

    @property
    def absorbed(self) -> list[Node]:
        return [n for n in (*self.values, *self.reduces) if n not in self.anchors]

    @property
    def work(self) -> list[Node]:
        """Absorbed nodes that compute something (views do not)."""
        return [n for n in self.absorbed if not renames(n) and n not in self.lanes]

    @property
    def idle(self) -> bool:
        """Does the region compute only the product, as an unfused GEMM does? A cast that the
        readers of the product could do does not count."""
        if not self.work:
            return True
        program = self.program
        bare = not (program.steps or program.operands or program.reduces) and self.total is None
        return bare and [s.dtype for s in program.stores] == [program.product_dtype]

    def is_bool(self, value: Value) -> bool:
        """Is ``value`` a bool in the program?"""
        step = self.step(value)
        return step is not None and step.op in OPS and OPS[step.op].boolean

    def step(self, value: Value) -> Step | None:
        """The step that computes ``value``, or None; the value's name is the step's."""
        name = str(value)
        return self.steps[int(name[1:])] if re.fullmatch(r"v\d+", name) else None

    def unrounded(self, value: Value) -> Step | None:
        """The step that computes ``value`` before it is rounded, or None."""
        step = self.step(value)
        rounds = step is not None and step.op in ROUNDING.values()
        return self.step(step.args[0]) if step is not None and rounds else step

    def operand(self, node: Node, kind: str) -> str:
        """The name of ``node`` as an operand of ``kind``."""
        if (operand := self.operands.get((node, kind))) is None:
            covers, dtype = "row" if kind == SWAPPED else kind, fake(node).dtype
            name = f"{KINDS[covers].letter}{len(self.operands)}"
            if kind == "col" and self.grouped and dtype in HALF:
                dtype = torch.float32  # groups start anywhere; copies need 4 bytes
            operand = Operand(name, covers, dtype_name(dtype))
            self.operands[node, kind] = operand
        return operand.name

    def stored(self, is_final: Callable[[Node], bool] = lambda _: True) -> dict[Value, list[Node]]:
        """Values that ``is_final`` outside nodes read, each with the nodes that they read."""
        inside = {*self.values, *self.reduces}
        result: dict[Value, list[Node]] = {}
        for node, value in self.values.items():
            if any(user not in inside and is_final(user) for user in node.users):
                result.setdefault(value, []).append(node)
        return result

    @functools.cached_property
    def program(self) -> EpilogueProgram:
        """The frozen program, simplified and verified. The region must not grow afterwards."""
        stores = tuple(
            Store(f"out{i}", str(value), dtype_name(self._stored_dtype(nodes)))
            for i, (value, nodes) in enumerate(self.stored().items())
        )
        a, b = gemm_inputs(self.anchors[0])
        program = EpilogueProgram(
            self.accs,
            dtype_name(fake(a).dtype),
            tuple(self.operands.values()),
            tuple(self.steps),
            stores,
            tuple(dict.fromkeys(self.reduces.values())),  # one may have several readers
            dtype_name(fake(b).dtype),
            fast_accumulation(self.anchors[0]),
            0 if self.heads is None else self.heads[0],
            bool(self.lanes),
        )
        if self.eager:
            return verify(simplify(program, exact=True), eager=True)
        program = simplify(program)
        # Sums over M that are never combined with a tile: the gradients of biases and gammas.
        columns = {r.name for r in self.reduces.values() if r.axis == "col"}
        columns -= {r.name for n, r in self.reduces.items() if not _ends_alone(n)}
        return verify(simplify(consistent(program, columns, self._logits(program))))

    def _logits(self, program: EpilogueProgram) -> dict[str, str]:
        """The values of which rows' log-sum-exps are taken, with their dtypes in the graph. They
        round to these if they are not stored too: policies are compared with one another."""
        nodes = {reduce.name: node.all_input_nodes[0] for node, reduce in self.reduces.items()}
        rows = [reduce for reduce in program.reduces if reduce.combine in OF_ROWS]
        return {reduce.value: dtype_name(narrowest(nodes[reduce.name])) for reduce in rows}

    def _stored_dtype(self, nodes: list[Node]) -> torch.dtype:
        """The dtype in which the value of all ``nodes`` is stored.

        It is the narrowest dtype that all of them can be restored from without loss: a float32 copy
        of a bfloat16 value is stored as bfloat16, and its readers convert while they read. A graph
        output without narrower copies is an exception: converting it would need another kernel.
        """
        dtype = _common([fake(node).dtype for node in nodes])
        leaves = any(user.op == "output" for node in nodes for user in readers(node)[1])
        wide = leaves and all(fake(node).dtype == dtype for node in nodes)
        return dtype if wide and len(self.accs) == 1 else _common([narrowest(n) for n in nodes])


def in_place(terms: tuple[Node, ...]) -> bool:
    """Can one kernel read the ``terms`` of a sum in place? On a CPU: do two have one K?"""
    pairs = [gemm_inputs(t) for t in terms]
    left, right = [fake(a) for a, _ in pairs], [fake(b) for _, b in pairs]
    if left[0].is_cuda:
        return joinable(left, right)
    return len(pairs) == 2 and same(left[0].shape[1], left[1].shape[1])


def _ends_alone(node: Node) -> bool:
    """Does ``node`` reach the graph's output without an op that combines it with another tensor?"""

    def meets(user: Node) -> bool:
        tensors = [n for n in user.all_input_nodes if isinstance(fake(n), torch.Tensor)]
        return user.op != "output" and len(tensors) > 1

    return not any(map(meets, closure(node.users, lambda n: () if meets(n) else n.users)))


def _common(dtypes: list[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def narrowest(node: Node) -> torch.dtype:
    """The 16-bit dtype that ``node`` had before a cast to float32, if any; else its own dtype."""
    rounded = base(node, lambda n: fake(n).dtype not in HALF and renames_or_casts(n))
    return fake(rounded).dtype if fake(rounded).dtype in HALF else fake(node).dtype
