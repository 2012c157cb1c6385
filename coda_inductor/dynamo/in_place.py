# SPDX-License-Identifier: Apache-2.0
"""In-place ops on a tensor whose memory is not shared become out-of-place ops.

Before::

    mean = x.pow(2).mean(-1, keepdim=True);  rstd = mean.add_(eps).rsqrt_()
    y = linear(h, W);  y += x
    bias = zeros(T, T);  bias.masked_fill_(hidden, -inf)     # as SDPA's documentation writes it

After::

    mean = x.pow(2).mean(-1, keepdim=True);  rstd = mean.add(eps).rsqrt()
    y = linear(h, W);  add = y + x
    bias = zeros(T, T).masked_fill(hidden, -inf)

Why it is valid: the tensor was created in this graph, is no view, and no view of it exists, so
later readers can read the result instead. Both ops compute the same, in one dtype.

What it enables: patterns and masks do not match across in-place changes.

Leaves alone, silently, because the graph does not get worse: tensors whose memory may be shared;
ops that would promote; ops in another mode (``no_grad``, autocast) than their tensor; in 16 bits,
ops that autocast would run in float32.
"""

import operator
from typing import Any

import torch.nn.functional as F
from torch.fx import Graph, Node

from coda_inductor.compat import HigherOrderOperator, OpOverloadPacket
from coda_inductor.graph.edit import evaluate
from coda_inductor.graph.nodes import fake, plain
from coda_inductor.graph.read import is_torch, read
from coda_inductor.graph.sizes import same_layout
from coda_inductor.matching import bodies, memory
from coda_inductor.matching.guards import changes_mode
from coda_inductor.record import Record

_OPERATORS = {
    operator.iadd: operator.add, operator.isub: operator.sub,
    operator.imul: operator.mul, operator.itruediv: operator.truediv,
}  # fmt: skip
_WITH_FLAG = (F.silu, F.relu)
#: Methods that compute in the dtype of their inputs, also under autocast; and the others.
_SAME_DTYPE = (
    "add_", "sub_", "mul_", "div_", "neg_", "sigmoid_", "tanh_", "relu_", "masked_fill_", "triu_",
    "tril_",
)  # fmt: skip
_WIDENED = ("rsqrt_", "sqrt_", "square_", "reciprocal_", "pow_", "exp_")


def change_copies(graph: Graph, _record: Record) -> None:
    """Apply the rewrite to ``graph`` and its checkpointed regions, in place."""
    for body in bodies(graph):
        _change(body.graph)


def _change(graph: Graph) -> None:
    mode, modes = 0, dict[Node, int]()
    sharing: dict[int, set[Node]] = {}  # storage -> earlier nodes, without ``replaced``
    replaced: set[Node] = set()
    for node in list(graph.nodes):
        mode += changes_mode(node)
        call = _plain(node)
        target = None if call is None else next(iter(call[1]), None)
        if call is not None and isinstance(target, Node) and modes.get(target) == mode:
            others = {n for s in memory(target) or () for n in sharing.get(s, ())} - replaced
            if _owned(target) and others == {target} and _same_result(node, call):
                with graph.inserting_before(node):
                    create = graph.call_method if isinstance(call[0], str) else graph.call_function
                    new = create(*call)
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                target.replace_all_uses_with(new, delete_user_cb=lambda n, at=node: at < n)
                graph.erase_node(node)
                replaced.add(target)
                node = new  # noqa: PLW2901 (the replacement)
        modes[node] = mode
        for storage in memory(node) or ():
            sharing.setdefault(storage, set()).add(node)


def _plain(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The out-of-place call with the result of ``node``; None if no such call exists."""
    if node.op == "call_method" and node.target in (*_SAME_DTYPE, *_WIDENED):
        return str(node.target)[:-1], node.args, dict(node.kwargs)
    if node.op != "call_function":
        return None
    if node.target in _OPERATORS:
        return _OPERATORS[node.target], node.args, {}
    call = read(node) if node.target in _WITH_FLAG else None
    changes = call is not None and call["inplace"] is True
    return (node.target, (call["input"],), {}) if call is not None and changes else None


def _owned(target: Node) -> bool:
    """Did a function of torch or an op of a library create ``target``, only for this graph?
    AOTAutograd compiles no library's op whose result is an alias."""
    if target.op == "call_method":
        return True
    plain = target.op == "call_function" and target.target is not operator.getitem
    made = isinstance(target.target, OpOverloadPacket) or is_torch(target.target)
    return plain and made and not isinstance(target.target, HigherOrderOperator)


def _same_result(node: Node, call: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> bool:
    (want,) = plain(node) or (None,)
    if want is None or any(fake(n) is None for n in node.all_input_nodes):
        return False
    if node.target in _WIDENED and want.element_size() < 4:
        return False
    return same_layout(evaluate(*call, like=node), want)
