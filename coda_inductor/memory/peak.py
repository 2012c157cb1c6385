# SPDX-License-Identifier: Apache-2.0
"""The memory of one training step over time, before it is compiled.

Kernels run in the graph's order; a node that is computed again runs right before its first reader,
as torch's partitioner orders it. A *stored* value has memory of its own: results and inputs of
heavy nodes, kept tensors, and outputs. All others exist only inside kernels: their readers read the
stored values that they are computed from. Memory is freed after the last reader. This also holds
for outputs of the forward pass that the backward pass reads (logits), unless the caller holds them.
A gradient of an output is an input of the backward pass that autograd makes, of
zeros if the caller computes none. An elementwise kernel overwrites an operand if it is the last
reader, also a saved tensor that AOTAutograd donates. Gradients stay.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from coda_inductor.compat import functorch_config
from coda_inductor.graph.nodes import aten, bytes_of, is_cast
from coda_inductor.graph.sides import is_tangent
from coda_inductor.graph.vocabulary import REDUCTIONS
from coda_inductor.graph.walk import closure
from coda_inductor.memory.candidates import Drop, Stash, heavy, maker, owner
from coda_inductor.memory.costs import workspace

#: A stored value, and whether the backward pass computes it (again).
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
        stash: the graph's nodes, and the tensors that it keeps.
        results: the outputs of the joint graph (of both passes).
    """

    def __init__(self, stash: Stash, results: Iterable[Node]):
        self.stash, self.results = stash, {owner(n) for n in results}
        self._stay = {
            n
            for n in self.results
            if n not in stash.forward or not any(u in stash.backward for u in stash.readers(n))
        }
        #: Of the backward pass, but from forward values alone: computed right before its reader.
        given = [n for n in stash.backward if n.op != "call_function"]  # gradients of outputs
        self._lazy = stash.backward.keys() - closure(given, lambda n: n.users)
        self._halves = {alone: result for result, alone in stash.halves.items()}
        self._read_cache: dict[Node, tuple[Node, ...]] = {}
        self._stored = {n for n in (*stash.forward, *stash.backward) if self._is_stored(n)}

    def peak(self, drop: Drop, *, held: bool = False) -> int:
        """The peak of memory in bytes, beyond the graph's inputs, under ``drop``. ``held``: the
        caller holds all outputs of the forward pass until the backward pass has ended."""
        stay = self.results if held else self._stay
        kernels = self._kernels(drop)
        last = {value: i for i, kernel in enumerate(kernels) for value in kernel.reads}
        frees: dict[int, list[_Value]] = {}
        for i, kernel in enumerate(kernels):
            for value in kernel.writes:
                frees.setdefault(max(i, last.get(value, 0)), []).append(value)
        alive = most = 0
        for i, kernel in enumerate(kernels):
            alive += bytes_of(*(node for node, _ in kernel.writes))
            over = frees.get(i, [])
            most = max(most, alive + kernel.workspace - self._overwritten(kernel, over))
            alive -= bytes_of(*(node for node, _ in over if node not in stay))
        return most

    def _overwritten(self, kernel: _Kernel, over: Sequence[_Value]) -> int:
        """Bytes of results that overwrite operands; ``over``: the values that end here."""
        if not kernel.elementwise:
            return 0
        sizes = [bytes_of(node) for node, _ in kernel.writes]
        total = 0
        for node, again in over:
            writable = again or node in self.stash.backward or functorch_config.donated_buffer
            if writable and node not in self.results and bytes_of(node) in sizes:
                sizes.remove(bytes_of(node))
                total += bytes_of(node)
        return total

    def _kernels(self, drop: Drop) -> list[_Kernel]:
        forward, saved = self.stash.forward, self.stash.after(drop)
        first = filter(self._runs, forward)
        kernels = [self._kernel(n, [(s, False) for s in self._reads(n)], False) for n in first]
        done: set[Node] = set()
        for node in self.stash.backward:
            if self._runs(node) and (node not in self._lazy or node in self.results):
                for origin in (*self._missing(node, drop, done), node):
                    values = [(s, s in forward and s not in saved) for s in self._reads(origin)]
                    kernels.append(self._kernel(origin, values, origin in forward))
        return kernels

    def _missing(self, node: Node, drop: Drop, done: set[Node]) -> list[Node]:
        """The kernels that run for ``node`` alone, in order, some of them a second time."""
        saved = self.stash.after(drop)
        kernels: list[Node] = []
        todo = [node]
        while todo:
            new = [
                maker(self.stash.halves[source] if source in drop.halves else source)
                for source in self._reads(todo[-1])
                if source in self._lazy or (source in self.stash.forward and source not in saved)
            ]
            new = [n for n in dict.fromkeys(new) if n not in done]
            if new:
                todo += new
                continue
            top = todo.pop()
            if top is not node and top not in done:
                done.add(top)
                kernels.append(top)
        return kernels

    def _kernel(self, node: Node, reads: list[_Value], again: bool) -> _Kernel:
        parts = [user for user in node.users if user.target is operator.getitem]
        if parts and parts[0] in self._halves:
            parts, again = [self._halves[parts[0]]], True
        writes = tuple((part, again) for part in parts or [node])
        return _Kernel(tuple(reads), writes, workspace(node), not heavy(maker(node)))

    def _runs(self, node: Node) -> bool:
        return node.target is not operator.getitem and node in self._stored

    def _is_stored(self, node: Node) -> bool:
        if is_tangent(node):
            return True
        if node.op != "call_function" or owner(node) is not node:
            return False
        if heavy(maker(node)) or node in self.stash.tensors or node in self.results:
            return True
        # Kernels of reductions cast what they read, as a norm's input to float32.
        inlined = (*REDUCTIONS, aten.var_mean.correction) if is_cast(node) else ()
        return any(heavy(n) and n.target not in inlined for n in self.stash.readers(node))

    def _reads(self, node: Node) -> tuple[Node, ...]:
        if node not in self._read_cache:
            values: dict[Node, None] = {}
            todo = [owner(n) for n in node.all_input_nodes]
            visited = set(todo)
            while todo:
                top = todo.pop()
                if top in self._stored:
                    values[top] = None
                else:
                    new = {owner(n) for n in top.all_input_nodes} - visited
                    visited |= new
                    todo += sorted(new)
            self._read_cache[node] = tuple(values)
        return self._read_cache[node]
