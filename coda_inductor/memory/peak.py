# SPDX-License-Identifier: Apache-2.0
"""The memory of one training step over time, before it is compiled.

Kernels run in the graph's order; what is computed again runs right before its first reader, as
torch's partitioner orders it. A *stored* value has memory of its own: a result of a heavy node,
what a heavy node reads, what is kept, and outputs. All others exist only inside kernels: whoever
reads them reads the stored values that they are computed from. Memory is freed after the last
reader, also that of outputs of the forward pass that the backward pass reads (logits): a caller who
holds them needs as much more. An elementwise kernel writes over an operand that ends with it, also
over what was saved for the backward pass where AOTAutograd donates it. Gradients stay.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from coda_inductor.compat import functorch_config
from coda_inductor.graph.nodes import bytes_of
from coda_inductor.graph.sides import is_tangent
from coda_inductor.memory.candidates import Freed, Kept, heavy, maker, owner
from coda_inductor.memory.costs import workspace

#: A stored value, and whether it is the one of the backward pass's own computation.
_Value = tuple[Node, bool]


@dataclass(frozen=True)
class _Kernel:
    reads: tuple[_Value, ...]
    writes: tuple[_Value, ...]
    workspace: int
    elementwise: bool


class Timeline:
    """The schedule of one graph.

    Args:
        kept: what it computes and keeps.
        results: the outputs of the joint graph, of forward and backward pass.
    """

    def __init__(self, kept: Kept, results: Iterable[Node]):
        self.kept, self.results = kept, {owner(n) for n in results}
        self._stay = {
            n
            for n in self.results
            if n not in kept.forward or not any(u in kept.backward for u in kept.readers(n))
        }
        #: Of the backward pass, but from forward values alone: computed right before its reader.
        self._lazy = {n: None for n in kept.backward if n.op == "call_function"}
        for node in kept.backward:
            if is_tangent(node) or any(
                n in kept.backward and n not in self._lazy for n in node.all_input_nodes
            ):
                self._lazy.pop(node, None)
        self._halves = {alone: result for result, alone in kept.halves.items()}
        self._known: dict[Node, tuple[Node, ...]] = {}
        self._stored: dict[Node, bool] = {}

    def peak(self, freed: Freed) -> int:
        """The most bytes that are held at once beyond the graph's inputs under ``freed``."""
        kernels = self._kernels(freed)
        last = {value: at for at, kernel in enumerate(kernels) for value in kernel.reads}
        frees: dict[int, list[_Value]] = {}
        for at, kernel in enumerate(kernels):
            for value in kernel.writes:
                frees.setdefault(max(at, last.get(value, 0)), []).append(value)
        now = most = 0
        for at, kernel in enumerate(kernels):
            now += bytes_of(*(node for node, _ in kernel.writes))
            over = frees.get(at, [])
            most = max(most, now + kernel.workspace - self._overwritten(kernel, over))
            now -= bytes_of(*(node for node, _ in over if node not in self._stay))
        return most

    def _overwritten(self, kernel: _Kernel, over: Sequence[_Value]) -> int:
        """Bytes of results that take the place of operands, for ``over``: what ends here."""
        if not kernel.elementwise:
            return 0
        own = [bytes_of(node) for node, _ in kernel.writes]
        found = 0
        for node, again in over:
            mine = again or node in self.kept.backward or functorch_config.donated_buffer
            if mine and node not in self.results and bytes_of(node) in own:
                own.remove(bytes_of(node))
                found += bytes_of(node)
        return found

    def _kernels(self, freed: Freed) -> list[_Kernel]:
        forward = [n for n in self.kept.forward if self._runs(n)]
        kernels = [self._kernel(n, [(s, False) for s in self._reads(n)], False) for n in forward]
        has = self.kept.there(freed)
        done: set[Node] = set()
        for node in self.kept.backward:
            if self._runs(node) and (node not in self._lazy or node in self.results):
                for each in (*self._missing(node, freed, done), node):
                    again = each in self.kept.forward
                    kernels.append(self._kernel(each, self._values(each, has), again))
        return kernels

    def _missing(self, node: Node, freed: Freed, done: set[Node]) -> list[Node]:
        """The kernels that run for ``node`` alone, those of the forward pass again, in order."""
        has = self.kept.there(freed)
        found: list[Node] = []
        todo = [node]
        while todo:
            new = [
                maker(self.kept.halves[source] if source in freed.halves else source)
                for source in self._reads(todo[-1])
                if source in self._lazy or (source in self.kept.forward and source not in has)
            ]
            new = [each for each in dict.fromkeys(new) if each not in done]
            if new:
                todo += new
                continue
            top = todo.pop()
            if top is not node and top not in done:
                done.add(top)
                found.append(top)
        return found

    def _values(self, node: Node, has: Collection[Node]) -> list[_Value]:
        """What ``node`` reads where it runs in the backward pass."""
        mine = self.kept.forward
        return [(source, source in mine and source not in has) for source in self._reads(node)]

    def _kernel(self, node: Node, reads: list[_Value], again: bool) -> _Kernel:
        parts = [user for user in node.users if user.target is operator.getitem]
        if parts and parts[0] in self._halves:
            parts, again = [self._halves[parts[0]]], True
        writes = tuple((part, again) for part in parts or [node])
        return _Kernel(tuple(reads), writes, workspace(node), not heavy(maker(node)))

    def _runs(self, node: Node) -> bool:
        """Is ``node`` the result of a kernel?"""
        return node.target is not operator.getitem and self._is_stored(node)

    def _is_stored(self, node: Node) -> bool:
        if node.op != "call_function" or owner(node) is not node:
            return False
        if node not in self._stored:
            self._stored[node] = (
                heavy(maker(node))
                or node in self.kept.kept
                or node in self.results
                or any(map(heavy, self.kept.readers(node)))
            )
        return self._stored[node]

    def _reads(self, node: Node) -> tuple[Node, ...]:
        """The stored values that the kernel of ``node`` reads, inputs of the graph apart."""
        if node not in self._known:
            found: dict[Node, None] = {}
            todo = [owner(n) for n in node.all_input_nodes]
            seen = set(todo)
            while todo:
                each = todo.pop()
                if self._is_stored(each):
                    found[each] = None
                else:
                    new = {owner(n) for n in each.all_input_nodes} - seen
                    seen |= new
                    todo += sorted(new)
            self._known[node] = tuple(found)
        return self._known[node]
