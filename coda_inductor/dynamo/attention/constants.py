# SPDX-License-Identifier: Apache-2.0
"""The part of a Dynamo graph that depends only on constants, and its values.

Models build masks and positions from sizes: ``arange``, comparisons, broadcasts. If no tensor of
the user is involved, the values are constant. They are computed at compile time on the CPU, by
running the nodes of the graph itself.

A number stands for symbolic sizes, where elements depend on their indices alone: compared with each
other and with numbers, of which all orders occur below twice their sum (docs/internals/rules.md).

Refuses, always with a reason: inputs, parameters and buffers; other uses of symbolic sizes; random
numbers; results of in-place ops, and what depends on them; more than ``MAX_BYTES`` in one tensor.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from coda_inductor.compat import TorchDispatchMode, tree_map, unset_fake_temporarily
from coda_inductor.graph.edit import run
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.read import is_torch, op_name, read
from coda_inductor.graph.walk import closure
from coda_inductor.matching import Body, changes
from coda_inductor.refusal import Refusal, Refused, refuse

#: Ops for which only dtype, device and shape of this argument matter, if it is a tensor.
_LIKE = {
    **dict.fromkeys(("new_ones", "new_zeros", "new_full"), "input"),
    **dict.fromkeys(("ones_like", "zeros_like", "full_like"), "input"),
    **dict.fromkeys(("to", "type_as", "expand_as"), "other"),
}
_CPU = torch.device("cpu")
_SYMBOLS = torch.SymInt, torch.SymFloat, torch.SymBool
#: Where sizes are symbolic: ops of elements, of sizes; keywords (no end); dtypes; a sum of numbers.
_OPS = ("add", "and_", "cumsum", "diff", "eq", "ge", "getitem", "gt", "le", "lt", "ne", "or_",
        "sub", "to", "tril", "unsqueeze")  # fmt: skip
_SIZED, _KEYWORDS = ("arange", "expand", "new_ones", "ones"), {"device", "dim", "dtype", "prepend"}
_DTYPES, _FAR = (torch.bool, torch.int32, torch.int64), 128
#: Limit for one tensor: a boolean mask of 32768 x 32768. A few are alive at a time.
MAX_BYTES = 2**30


class Constants:
    """Constant nodes of ``body``, a Dynamo graph or its region; ``around``: the outer constants."""

    def __init__(self, body: Body, around: "Constants | None" = None):
        self._outer, self._outer_constants = body.outer, around
        self._why: dict[Node, Refusal | None] = {}
        #: The nodes that in-place ops of this graph may write to.
        self.changed = changes(body.graph)
        for node in body.graph.nodes:
            self._why[node] = self._check(node)

    def home(self, node: Node) -> "tuple[Node, Constants]":
        """(node, its graph's constants) for ``node``, or for the outer node passed in for it."""
        if node in self._outer and self._outer_constants is not None and node not in self.changed:
            return self._outer_constants.home(self._outer[node])
        return node, self

    def _check(self, node: Node) -> Refusal | None:
        if node in self.changed:
            return refuse("mask-mutated", "an in-place op changes it")
        if node in self._outer and self._outer_constants is not None:
            return self._outer_constants._why[self._outer[node]]
        value = fake(node)
        if isinstance(value, _SYMBOLS):
            return None if _is_symbol(node) else refuse("mask-size", "its size is symbolic")
        if node.op in ("placeholder", "get_attr") or not _is_torch(node):
            text = f"it depends on {getattr(node.target, '__name__', node.target)}"
            return refuse("mask-data", text)
        for source in _sources(node):
            if self._why[source] is not None:
                return self._why[source]
        whole = closure([node], _sources)
        symbols = any(map(_is_symbol, whole))
        if symbols or any(isinstance(size, _SYMBOLS) for size in getattr(value, "shape", ())):
            known = symbols and _reach(whole) <= _FAR
            return None if known else refuse("mask-size", "its size is symbolic")
        if isinstance(value, torch.Tensor) and value.numel() * value.itemsize > MAX_BYTES:
            return refuse("mask-form", f"it takes more than {MAX_BYTES >> 20} MiB to evaluate")
        return None

    def value(self, node: Node) -> torch.Tensor:
        """The value of ``node`` as a CPU tensor. Its symbolic sizes have some number.

        Raises:
            Refused: with the reason, if it is not constant or cannot be computed.
        """
        if (why := self._why[node]) is not None:
            raise Refused(why)
        if node in self._outer and self._outer_constants is not None:
            return self._outer_constants.value(self._outer[node])
        with unset_fake_temporarily(), torch.no_grad(), _NoRandom():
            try:
                result = self._run(node)
            except Refused:
                raise
            except Exception as error:  # an op that the CPU lacks: the mask stays
                why = refuse("mask-form", f"evaluating it failed: {error}")
                raise Refused(why) from error
        if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
            raise Refused(refuse("mask-form", "it cannot be evaluated on the CPU"))
        return result

    def _run(self, node: Node) -> Any:
        order = sorted(closure([node], _sources))
        size = 2 * int(_reach(order)) + 3 if any(map(_is_symbol, order)) else None
        last = {source: user for user in order for source in _sources(user)}
        values: dict[Node, Any] = {}
        for step in order:

            def value_of(source: Node) -> Any:
                return values[source] if source in values else _sample(fake(source))

            args = torch.fx.node.map_arg((step.args, step.kwargs), value_of)
            args, kwargs = tree_map(_on_cpu, args)
            if kwargs.get("device") is not None:  # a number too
                kwargs = {**kwargs, "device": _CPU}
            if step.target == "cuda":
                values[step], *_ = args
            elif _is_symbol(step):
                values[step] = size
            elif step in self._outer and self._outer_constants is not None:
                values[step] = self._outer_constants.value(self._outer[step])
            else:
                values[step] = run(step.target, args, kwargs)
            if size and op_name(step) == "getitem" and _wraps(args[1]):
                raise Refused(refuse("mask-size", "its size is symbolic"))
            for source in _sources(step):
                if last[source] is step:
                    del values[source]
        return values[node]


def _is_symbol(node: Node) -> bool:
    value = fake(node)
    return isinstance(value, torch.SymInt) and value.node.expr.is_symbol


def _reach(nodes: Iterable[Node]) -> float:
    """The sum of the numbers that ``nodes`` add to indices or compare with them, and of static
    sizes; ``inf`` if an element of a tensor depends on more than its indices."""
    nodes = [node for node in nodes if not _is_symbol(node)]
    if not all(map(_is_of_indices, nodes)):
        return math.inf
    counted = (node for node in nodes if op_name(node) not in ("expand", "new_ones", "ones"))
    return sum(abs(number) for node in counted for number in _numbers(node))


def _is_of_indices(node: Node) -> bool:
    op, sources = op_name(node), [fake(source) for source in node.all_input_nodes]
    if getattr(fake(node), "dtype", None) not in _DTYPES or node.kwargs.keys() - _KEYWORDS:
        return False
    if op in _SIZED:
        return op != "arange" or not any(node.args[:-1])
    if op not in _OPS or not all(isinstance(source, torch.Tensor) for source in sources):
        return False
    if op == "getitem":  # not from the end, nor as many as a mask says
        selects = any(source.dtype == torch.bool for source in sources[1:])
        return not selects and min(_numbers(node), default=0) >= 0
    if op in ("cumsum", "and_", "or_"):  # counts, but no sums of indices, nor their bits
        return all(source.dtype == torch.bool for source in sources)
    return len(node.args) < 5 and (op not in ("add", "sub") or len(sources) == 1)


def _numbers(node: Node) -> list[float]:
    """The numbers among the arguments of ``node``, bounds of slices too."""
    leaves: list[Any] = []
    map_aggregate((node.args, node.kwargs), leaves.append)
    return [leaf for leaf in leaves if isinstance(leaf, int | float)]


def _wraps(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and bool((part < 0).any()) for part in parts)


def _sources(node: Node) -> list[Node]:
    if isinstance(fake(node), _SYMBOLS):
        return []
    call = read(node)
    argument = None if call is None else _LIKE.get(call.op)
    if call is None or argument is None or not isinstance(fake(call.get(argument)), torch.Tensor):
        return node.all_input_nodes
    sources: list[Node] = []
    torch.fx.node.map_arg([call[name] for name in call.args if name != argument], sources.append)
    return sources


def _sample(like: torch.Tensor) -> torch.Tensor:
    """A tensor with the shape and dtype of ``like``. Its values do not matter, and a symbolic shape
    does not either, because the result does not have it."""
    static = all(isinstance(size, int) for size in like.shape)
    return torch.zeros((), dtype=like.dtype).expand(like.shape if static else ())


def _is_torch(node: Node) -> bool:
    """Is it a tensor method, or a plain function of torch or Python? Functions with state, such as
    the parts of vmap, do not count."""
    state = "functorch" in (getattr(node.target, "__module__", None) or "")
    return node.op == "call_method" or (is_torch(node.target) and not state)


def _on_cpu(arg: Any) -> Any:
    device = isinstance(arg, torch.device) or (isinstance(arg, str) and arg.startswith("cuda"))
    return _CPU if device else arg


class _NoRandom(TorchDispatchMode):
    """Refuses ops that draw random numbers, which are unknown and change the user's generator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused(refuse("mask-form", f"{func} draws random numbers"))
        return func(*args, **(kwargs or {}))
