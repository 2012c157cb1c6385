# SPDX-License-Identifier: Apache-2.0
"""How pairs of token and expert are sorted by expert, counted, and summed by token (``experts``).

There are M = T * top_k pairs of T tokens, in the order of tokens; ``perm`` (M,) sorts them by
expert. After the last product, rows are put back in the order of tokens and summed by token, or
added to the row of their token; they are weighted before or after.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.graph.nodes import fake, is_cast
from coda_inductor.graph.read import Call, called, kind, op_name, read
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, only_reader


def _name(node: Node) -> bool:
    if (call := called(node, "getitem")) is not None:  # w[:, None]
        index, whole = call["index"], (slice(None), None, Ellipsis)
        return isinstance(index, tuple) and all(any(i is w or i == w for w in whole) for i in index)
    return kind(node) in ("names", "copies", "casts", "detaches")


def _passes(node: Node) -> bool:
    """Does ``node`` rename or cast numbers (``_name``), pass on a gradient and truncate nothing?"""
    if not _name(node) or kind(node) == "detaches":
        return False
    return all(fake(n).is_floating_point() for n in (node, node.all_input_nodes[0]))


@dataclass
class Pairs:
    """The pairs of one block: ``ids`` (M,), the expert of each pair; ``perm``, the node that sorts
    them; the number of experts, if they are ``counted``."""

    ids: Node
    perm: Node
    top_k: int
    experts: int = 0

    @staticmethod
    def of(index: Any) -> "Pairs | None":
        """The pairs if ``index`` holds the token of each pair, ``perm // top_k``; else None."""
        perm, top_k = tokens(index)
        ids = _sorted(perm)
        tensor = fake(ids)
        if ids is None or tensor is None or tensor.dim() != 1 or tensor.is_floating_point():
            return None
        return Pairs(ids, perm, top_k)

    def counted(self, offs: Node, experts: int) -> bool:
        """Are ``offs`` the ends of each expert's pairs: a cumulative sum of their counts?"""
        ends = called(base(offs, _name), "cumsum")
        counts = called(base(ends["input"], _name), "histc") if ends is not None else None
        if ends is None or counts is None or ends["dim"] not in (0, -1):
            return False
        self.experts = experts
        edges = counts["bins"], counts["min"], counts["max"]
        fits = edges in ((experts, 0, experts - 1), (experts, 0, experts))
        ids = self.are_ids(base(counts["input"], _name))
        return fits and ids and fake(offs).dtype == torch.int32

    def are_ids(self, node: Any, *, in_order: bool = False) -> bool:
        """Does ``node`` hold the expert of each pair? ``in_order``: sorted by expert."""
        call, ids = called(node, "getitem"), base(self.ids, _name)
        if node is ids or call is None:
            return node is ids and not in_order
        if call["index"] == 0:  # the first result of a sort
            sort = called(call["input"], "sort")
            return sort is not None and base(sort["input"], _name) is ids
        return base(call["input"], _name) is ids and self.is_perm(call["index"])

    def empties(self, node: Node) -> bool:
        """Does ``node`` fill rows without an expert with zeros? Here these may have any values."""
        call = called(node, "masked_fill", "masked_fill_")
        mask = called(base(call["mask"], _name), "ge") if call is not None else None
        if call is None or mask is None or (call["value"], mask["other"]) != (0, self.experts):
            return False
        return self.are_ids(base(mask["input"], _name))

    def clamps(self, node: Node) -> bool:
        """Does ``node`` only change the numbers of pairs without an expert?"""
        call = called(node, "clamp", "clamp_")
        return call is not None and (call["min"], call["max"]) == (None, self.experts - 1)

    def bias(self, node: Any) -> tuple[Node, Node] | None:
        """(matrix, index) if ``node`` holds, for each sorted pair, the matrix's row of its expert;
        else None. Rows without an expert may have any values."""
        call = called(node, "getitem")
        if call is None or fake(call["input"]).dim() != 2:
            return None
        index = base(call["index"], lambda n: _name(n) or self.clamps(n))
        return (call["input"], call["index"]) if self.are_ids(index, in_order=True) else None

    def inverts(self, node: Node) -> bool:
        """Does ``node`` hold the position of each pair in the order of experts?"""
        node = base(node, _name)
        if (call := called(node, "argsort")) is not None:
            return base(call["input"], _name) is self.perm
        writes = [u for u in node.users if op_name(u) in ("setitem", "index_put_", "scatter_")]
        factory = called(node, "empty_like", "zeros_like", "empty", "zeros")
        if factory is None or [*map(op_name, writes)] != ["setitem"]:
            return False
        call = called(writes[0], "setitem")
        counts = None if call is None else called(call["value"], "arange")
        if call is None or counts is None or not self.is_perm(call["index"]):
            return False
        return counts.get("start") in (None, 0) and counts.get("step") in (None, 1)

    def is_perm(self, node: Any) -> bool:
        """Is ``node`` the permutation, in any dtype?"""
        return isinstance(node, Node) and base(node, _name) is self.perm


def tokens(index: Any) -> tuple[Any, int]:
    """(perm, top_k) if ``index`` is ``perm // top_k``, or repeats it along rows; or (index, 1)."""
    index = base(index, lambda n: _name(n) or op_name(n) in ("expand", "expand_as"))
    call = called(index, "floor_divide", "div")
    if call is None:
        return index, 1
    left, right = call["input"], call["other"]
    whole = isinstance(right, int) and not isinstance(right, bool)
    if not whole or (call.op == "div" and call.get("rounding_mode") != "floor"):
        return index, 1
    return base(left, _name), right


def by_row(index: Node, rows: Node) -> bool:
    """Does ``index``, (M,) or its repetition, have one number per row of ``rows`` (M, d)?"""
    tensor = fake(index)
    return tensor.dim() == 1 or (same(tensor.shape, fake(rows).shape) and tensor.stride(1) == 0)


def _index(call: Call) -> Any:
    index = call.get("index")
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    return first if all(i is None or i == slice(None) for i in rest) else None


def _sorted(perm: Any) -> Node | None:
    """The ids that ``perm`` sorts in ascending order, by argsort(ids) or sort(ids)[1]; or None."""
    call = called(perm, "argsort", "getitem")
    if call is not None and call.op == "getitem":
        call = called(call["input"], "sort") if call["index"] == 1 else None
    if call is None or call.get("descending") or call.get("dim") not in (-1, 0, None):
        return None
    return call["input"]


class Sum:
    """A sum of the rows of ``product``, sorted by expert, by token: a walk down to the result.

    Attributes:
        node: the current node of the walk, at the end the result.
        weights: of pairs, (T, top_k) or (M,) in the order of tokens, if any.
        onto: the tensor that the sum is added to, if any.
        bias: (E, d), one row per expert, if any.
    """

    def __init__(self, product: Node, pairs: Pairs):
        self.node, self.pairs = product, pairs
        self.weights: Node | None = None
        self.onto: Node | None = None
        self.bias: Node | None = None
        self.back = False  # in the order of tokens
        self.emptied = self.done = False
        self.dtype = fake(product).dtype

    def follow(self) -> "Sum | None":
        """Walk down to the result. Returns None if there is none."""
        while not self.done:
            if not self._step(only_reader(self.node)):
                return None
        dtype, rounded = fake(self.node).dtype, only_reader(self.node)
        if is_cast(rounded) and fake(rounded).dtype == self.dtype != dtype:
            self.node = rounded  # summed in float32, then rounded
            return self
        return self if torch.promote_types(dtype, self.dtype) == dtype else None

    def _step(self, user: Node | None) -> bool:
        call = read(user)
        if user is None or call is None or call.get("alpha") not in (None, 1):
            return False
        absorbs: Callable[[Call], bool] | None = getattr(self, f"_{call.op}", None)
        empties = self.pairs.empties(user)
        skips = empties or is_cast(user) or (_passes(user) and self.back and fake(user).dim() == 3)
        if not skips and (absorbs is None or not absorbs(call)):
            return False
        self.emptied = self.emptied or empties
        self.node = user if call.op != "setitem" else self.node
        return True

    def _mul(self, call: Call) -> bool:
        other = call["other"] if call["input"] is self.node else call["input"]
        if self.weights is not None or not isinstance(other, Node):
            return False
        self.weights = self._weights(other)
        return self.weights is not None

    def _add(self, call: Call) -> bool:
        """Is it a bias of each row's expert, while rows are sorted and not weighted yet? After a
        mask it is refused, because pairs without an expert would get a bias too."""
        bias = self.pairs.bias(call["other"] if call["input"] is self.node else call["input"])
        if self.back or self.emptied or self.bias or self.weights:
            return False
        self.bias = None if bias is None else bias[0]
        return self.bias is not None

    def _weights(self, node: Node) -> Node | None:
        """The weights of pairs in token order, if ``node``, (M, 1) or (T, top_k, 1), holds them in
        the present order of rows; else None."""
        tensor = fake(node)
        if tensor is None or not same(tensor.shape[-1], 1):
            return None
        node = base(node, _passes)
        if not self.back:
            call = called(node, "getitem")
            if call is None or not self.pairs.is_perm(_index(call)):
                return None
            return call["input"] if fake(call["input"]).dim() == 1 else None
        return node if self._of_pairs(node) else None

    def _of_pairs(self, node: Node) -> bool:
        """Does ``node`` have the shape (M,) or (T, top_k)?"""
        tensor = fake(node)
        return tensor.dim() == 1 or (tensor.dim() == 2 and same(tensor.shape[1], self.pairs.top_k))

    def _getitem(self, call: Call) -> bool:
        if self.back or not isinstance(call.get("index"), Node):
            return False
        self.back = self.pairs.inverts(call["index"])
        return self.back

    def _setitem(self, call: Call) -> bool:
        rows, index = call["input"], call["index"]
        users = [u for u in rows.users if u is not call.node]
        zeros = op_name(rows) in ("zeros", "zeros_like", "new_zeros", "empty_like", "empty")
        if self.back or call["value"] is not self.node or not zeros or len(users) != 1:
            return False
        (reader,) = users
        if not (self.pairs.is_perm(index) and call.node < reader and _passes(reader)):
            return False
        self.node, self.back = reader, True
        return True

    def _sum(self, call: Call) -> bool:
        dims = call.get("dim")
        dims = [dims] if isinstance(dims, int) else list(dims or ())
        x = fake(self.node)
        fits = self.back and x.dim() == 3 and same(x.shape[1], self.pairs.top_k)
        self.done = fits and dims in ([1], [-2]) and not call.get("keepdim")
        return self.done

    def _scatter_add(self, call: Call) -> bool:
        onto, index = call["input"], call["index"]
        if self.back or call["dim"] not in (0, -2) or call["source"] is not self.node:
            return False
        if not by_row(index, self.node) or tokens(index) != (self.pairs.perm, self.pairs.top_k):
            return False
        zeros = op_name(onto) in ("zeros", "zeros_like", "new_zeros") and len(onto.users) == 1
        self.onto, self.done = None if zeros else onto, True
        return True

    def _bmm(self, call: Call) -> bool:
        """Is it a product of weights (T, 1, top_k) and rows (T, top_k, d)?"""
        w = call["input"]
        tensor = fake(w)
        if self.weights is not None or not self.back or call["mat2"] is not self.node:
            return False
        if tensor.dim() != 3 or not same(tensor.shape[1:], (1, self.pairs.top_k)):
            return False
        self.weights, self.done = base(w, _passes), True
        return self._of_pairs(self.weights)

    _scatter_add_ = _index_add = _index_add_ = _scatter_add
