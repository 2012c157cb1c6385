# SPDX-License-Identifier: Apache-2.0
"""The part of a Dynamo graph that depends only on constants, and its values.

Models build masks and positions from sizes: ``arange``, comparisons, broadcasts. If no tensor of
the user is involved, the values are constant. They are computed at compile time on the CPU, by
running the nodes of the graph itself.

Up to two symbolic sizes get values too, where indices are compared with each other or with numbers:
those are added up, and each way in which indices, sizes and so many steps between them may be
ordered occurs at larger sizes, of which the first, the second or none is the larger one.

Refuses, always with a reason: inputs, parameters and buffers; other uses of symbolic sizes; random
numbers; results of in-place ops, and nodes that depend on them; more than ``MAX_BYTES`` in one
tensor.
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
#: What may be computed of symbolic sizes, in which dtypes, and the largest sum of its numbers.
_OPS = ("add", "and_", "arange", "cumsum", "diff", "eq", "expand", "ge", "getitem", "gt", "le",
        "lt", "ne", "new_ones", "ones", "or_", "sub", "to", "tril", "unsqueeze")  # fmt: skip
_DTYPES, _FAR = (torch.bool, torch.int32, torch.int64), 256
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
            return None if _is_size(value) else refuse("mask-size", "its size is symbolic")
        if node.op in ("placeholder", "get_attr") or not _is_torch(node):
            text = f"it depends on {getattr(node.target, '__name__', node.target)}"
            return refuse("mask-data", text)
        for source in _sources(node):
            if self._why[source] is not None:
                return self._why[source]
        symbols = _symbols(whole := closure([node], _sources))
        if symbols or any(isinstance(size, _SYMBOLS) for size in getattr(value, "shape", ())):
            known = 1 <= len(symbols) <= 2 and _reach(whole) <= _FAR
            return None if known else refuse("mask-size", "its size is symbolic")
        if isinstance(value, torch.Tensor) and value.numel() * value.itemsize > MAX_BYTES:
            return refuse("mask-form", f"it takes more than {MAX_BYTES >> 20} MiB to evaluate")
        return None

    def values(self, node: Node) -> list[torch.Tensor]:
        """The value of ``node``, or its values at three pairs of symbolic sizes, as CPU tensors.

        Raises:
            Refused: with the reason, if it is not constant or cannot be computed.
        """
        if (why := self._why[node]) is not None:
            raise Refused(why)
        if not (symbols := _symbols(whole := closure([node], _sources))):
            return [self._value(node, {})]
        small, large = (n * (2 * int(_reach(whole)) + 3) for n in (1, 2))
        pairs = (small, large), (large, small), (small, small)
        return [self._value(node, dict(zip(symbols, pair, strict=False))) for pair in pairs]

    def _value(self, node: Node, sizes: dict[str, int]) -> torch.Tensor:
        if node in self._outer and self._outer_constants is not None:
            return self._outer_constants._value(self._outer[node], sizes)
        with unset_fake_temporarily(), torch.no_grad(), _NoRandom():
            try:
                result = self._run(node, sizes)
            except Refused:
                raise
            except Exception as error:  # an op that the CPU lacks: the mask stays
                why = refuse("mask-form", f"evaluating it failed: {error}")
                raise Refused(why) from error
        if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
            raise Refused(refuse("mask-form", "it cannot be evaluated on the CPU"))
        return result

    def _run(self, node: Node, sizes: dict[str, int]) -> Any:
        order = sorted(closure([node], _sources))
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
            elif isinstance(fake(step), torch.SymInt):
                values[step] = sizes[str(fake(step))]
            elif step in self._outer and self._outer_constants is not None:
                values[step] = self._outer_constants._value(self._outer[step], sizes)
            else:
                values[step] = run(step.target, args, kwargs)
            for source in _sources(step):
                if last[source] is step:
                    del values[source]
        return values[node]


def _is_size(value: Any) -> bool:
    """Is it a symbol, not a number made of symbols?"""
    return isinstance(value, torch.SymInt) and value.node.expr.is_symbol


def _symbols(nodes: Iterable[Node]) -> list[str]:
    """The symbols among ``nodes``."""
    return sorted({str(fake(node)) for node in nodes if isinstance(fake(node), torch.SymInt)})


def _reach(nodes: Iterable[Node]) -> float:
    """The sum of the numbers by which ``nodes`` move indices or with which they compare them, or of
    indices that are no symbol's; ``inf`` if their tensors hold something else than indices and what
    compares them."""
    numbers: list[float] = []

    def add(each: Any) -> None:
        numbers.append(abs(each) if isinstance(each, int | float) else 0)

    for node in (n for n in nodes if not isinstance(fake(n), torch.SymInt)):
        op, sources = op_name(node), node.all_input_nodes
        if op not in _OPS or getattr(fake(node), "dtype", None) not in _DTYPES:
            return math.inf
        if op in ("add", "sub") and len(sources) > 1:
            return math.inf
        if op == "cumsum" and fake(sources[0]).dtype != torch.bool:  # it counts
            return math.inf
        if op not in ("expand", "new_ones", "ones"):
            map_aggregate((node.args, node.kwargs), add)
    return sum(numbers)


def _sources(node: Node) -> list[Node]:
    """The nodes whose values ``node`` depends on, of a size none."""
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
