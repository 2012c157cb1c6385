"""RMSNorm between GEMMs: the row scale moves past the GEMMs behind (R1), its statistics into the
GEMM in front (R2), and gamma is applied where the operand is stored.

Before::

    x = x0 + y @ Wo;  n, rstd = rms_norm(x, gamma, eps);  z = n @ W        (for every consumer)

After::

    x = x0 + y @ Wo;  h = x * gamma;  rstd = rsqrt(mean(x * x) + eps);  z = (h @ W) * rstd

Why it is valid: n = D_rstd (x * gamma), and (D_r X) W = D_r (X W). Nothing normalized is stored.

Refuses (the norm then stays as it was, for Inductor): x is not made in a GEMM's epilogue, so that
its statistics would cost a pass of their own; something other than a GEMM reads n; a consumer
cannot be fused; float16, where the un-normalized h may overflow (unless options["fp16_norms"]).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.fuse.region import GEMMS, gemm_inputs, grow
from coda_inductor.graph import ALIASES, aten, fake, insert, is_cast, module_path, prims, same
from coda_inductor.log import Failure, logger
from coda_inductor.semantic import rms_norm

#: From a GEMM node to the reason why its epilogue cannot or should not be fused, or None.
Legal = Callable[[Node], str | None]


def defer_norms(graph: Graph, legal: Legal, *, fp16: bool = False) -> dict[str, str]:
    """Apply the rewrite to every ``rms_norm`` where it is valid; returns where -> refusal
    reason, where being the norm's module path, or its node name if no module is known.

    ``legal`` says whether a GEMM's epilogue may be fused at all.
    """
    refused: dict[str, str] = {}
    for norm in [n for n in graph.nodes if n.target is rms_norm]:
        try:
            consumers, reason = _consumers(norm)
            reason = reason or _refusal(graph, norm, consumers, legal, fp16)
        except Exception as error:  # analysis only: nothing has been changed yet
            logger.debug("analysing %s failed", norm.name, exc_info=True)
            consumers, reason = [], Failure(f"{type(error).__name__} in our own passes: {error}")
        if reason is not None:
            logger.debug("rewrite: rms_norm at %s refused: %s", norm.name, reason)
            refused[module_path(norm) or norm.name] = reason
            continue
        _defer(graph, norm, consumers)
        logger.debug("rewrite: rms_norm at %s deferred past %d GEMMs", norm.name, len(consumers))
    return refused


def _consumers(norm: Node) -> tuple[list[Node], str | None]:
    """The GEMMs that read the normalized tensor as A, or why deferring is not valid."""
    outputs = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
    if 1 in outputs and outputs[1].users:
        return [], "its rstd is read"
    if 0 not in outputs:
        return [], "its result is not read"
    gemms, todo = [], [outputs[0]]
    width = fake(outputs[0]).shape[-1]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.target in GEMMS and gemm_inputs(user)[0] is node:
                if user.args.count(node) > 1:
                    return [], f"{user.name} reads it twice"
                gemms.append(user)
            elif user.target in ALIASES or is_cast(user):
                if not same(fake(user).shape[-1], width):
                    return [], f"{user.name} reshapes its rows"
                todo.append(user)
            else:
                return [], f"{user.name} ({user.target}) reads it and is not a GEMM"
    dtypes = {fake(gemm_inputs(g)[0]).dtype for g in gemms}
    if len(dtypes) > 1:
        return [], "its GEMMs run in different dtypes"
    return sorted(gemms), None


def _refusal(
    graph: Graph, norm: Node, consumers: list[Node], legal: Legal, fp16: bool
) -> str | None:
    if not consumers:
        return "no GEMM reads it"
    if fake(gemm_inputs(consumers[0])[0]).dtype == torch.float16 and not fp16:
        return "float16: the un-normalized operand may overflow (options['fp16_norms'] allows it)"
    for gemm in consumers:
        if (reason := legal(gemm)) is not None:
            return f"its GEMM {gemm.name} is not fused: {reason}"
    order = {node: i for i, node in enumerate(graph.nodes)}
    x = norm.args[0]
    producer = _producer(x)
    if producer is None:
        return "its input is not made by a GEMM"
    if (reason := legal(producer)) is not None:
        return f"the GEMM that makes its input, {producer.name}, is not fused: {reason}"
    region = grow((producer,), order)
    if x not in region.values or not same(fake(x).shape[-1], region.shape[1]):
        return f"its input is not made in the epilogue of {producer.name}"
    return None


def _producer(x: Node) -> Node | None:
    """The last GEMM whose tile ``x`` is elementwise computed from."""
    seen: set[Node] = set()
    todo, found = [x], []
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function" or len(seen) > 32:
            continue
        seen.add(node)
        if node.target in GEMMS:
            found.append(node)
        elif node.target in ALIASES or is_cast(node) or _elementwise(node):
            todo += node.all_input_nodes
    return max(found, default=None)


def _elementwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _defer(graph: Graph, norm: Node, consumers: list[Node]) -> None:
    x, weight, eps, _ = norm.args
    wide = torch.promote_types(fake(x).dtype, torch.float32)
    dtype = fake(gemm_inputs(consumers[0])[0]).dtype

    def put(target: Any, *args: Any) -> Node:
        node = insert(graph, target, args, like=norm)
        node.meta["coda_pattern"] = ("rms_norm", norm.name)
        return node

    def cast(node: Node, to: torch.dtype) -> Node:
        same_dtype = fake(node).dtype == to
        return node if same_dtype else put(prims.convert_element_type.default, node, to)

    with graph.inserting_before(norm):
        xw = cast(x, wide)
        mean = put(aten.mean.dim, put(aten.mul.Tensor, xw, xw), [-1], True)
        rstd = put(aten.rsqrt.default, put(aten.add.Tensor, mean, eps))
        rstd = put(aten.reshape.default, rstd, [-1, 1])
        h = xw if weight is None else put(aten.mul.Tensor, xw, cast(weight, wide))
        h = put(aten.reshape.default, cast(h, dtype), [-1, fake(x).shape[-1]])
    for gemm in consumers:
        _scale(graph, gemm, h, rstd, wide, norm)
    graph.eliminate_dead_code()


def _scale(graph: Graph, gemm: Node, h: Node, rstd: Node, wide: torch.dtype, norm: Node) -> None:
    """``gemm(n, W)`` becomes ``gemm(h, W) * rstd``; a bias is added behind the scale."""
    dtype = fake(gemm).dtype

    def put(target: Any, *args: Any) -> Node:
        node = insert(graph, target, args, like=gemm)
        node.meta["coda_pattern"] = ("rms_norm", norm.name)
        return node

    with graph.inserting_before(gemm):
        z = put(aten.mm.default, h, gemm_inputs(gemm)[1])
        z = put(prims.convert_element_type.default, z, wide) if dtype != wide else z
        z = put(aten.mul.Tensor, z, rstd)
        if gemm.target is aten.addmm.default:
            if (alpha := gemm.kwargs.get("alpha", 1)) != 1:
                z = put(aten.mul.Tensor, z, alpha)
            bias = gemm.args[0]
            if (beta := gemm.kwargs.get("beta", 1)) != 1:
                bias = put(aten.mul.Tensor, bias, beta)
            z = put(aten.add.Tensor, z, bias)
        z = put(prims.convert_element_type.default, z, dtype) if fake(z).dtype != dtype else z
    gemm.replace_all_uses_with(z)
    graph.erase_node(gemm)
