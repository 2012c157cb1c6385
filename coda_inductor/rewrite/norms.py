"""RMSNorm between GEMMs: the row scale moves past the GEMMs behind (R1), its statistics into the
GEMM in front (R2), and gamma is applied where the operand is stored.

Before::

    x = x0 + y @ Wo;  n, rstd = rms_norm(x, gamma, eps);  z = n @ W        (for every consumer)

After::

    x = x0 + y @ Wo;  h = x * gamma;  rstd = rsqrt(mean(x * x) + eps);  z = (h @ W) * rstd

Why it is valid: n = D_rstd (x * gamma), and (D_r X) W = D_r (X W). Nothing normalized is stored.
The backward pass of the norm is rewritten with it, see ``rewrite.norms_backward``.

Refuses (the norm then stays as it was, for Inductor): x is not made in a GEMM's epilogue, so that
its statistics would cost a pass of their own; something other than a GEMM, or the gradient of its
weight, reads n; a consumer cannot be fused; float16, where the un-normalized h may overflow (unless
options["fp16_norms"]).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.fuse.grow import grow
from coda_inductor.fuse.region import gemm_inputs
from coda_inductor.fuse.sums import Legal, producer
from coda_inductor.graph import ALIASES, Put, aten, fake, module_path, prune, readers, same
from coda_inductor.log import Failure, logger
from coda_inductor.rewrite.norm_uses import Uses, uses
from coda_inductor.rewrite.norms_backward import Scales, differentiate
from coda_inductor.semantic import rms_norm
from coda_inductor.sides import Scope

#: On nodes that the forward pass stores and the backward pass must not compute again.
KEEP = "coda_keep"


def defer_norms(graph: Graph, legal: Legal, *, fp16: bool = False) -> dict[str, str]:
    """Apply the rewrite to every ``rms_norm`` where it is valid; returns where -> refusal
    reason, where being the norm's module path, or its node name if no module is known.

    ``legal`` says whether a GEMM's epilogue may be fused at all.
    """
    refused: dict[str, str] = {}
    scope = Scope(graph)
    for norm in [n for n in graph.nodes if n.target is rms_norm]:
        try:
            found = uses(norm, scope)
            if isinstance(found, Uses):
                found = _refusal(norm, found, scope, legal, fp16) or found
        except Exception as error:  # analysis only: nothing has been changed yet
            logger.debug("analysing %s failed", norm.name, exc_info=True)
            found = Failure(f"{type(error).__name__} in our own passes: {error}")
        if isinstance(found, str):
            logger.debug("rewrite: rms_norm at %s refused: %s", norm.name, found)
            refused[module_path(norm) or norm.name] = found
            continue
        _defer(graph, norm, found, scope)
        scope.refresh(graph)
        logger.debug("rewrite: rms_norm at %s deferred past %d GEMMs", norm.name, len(found.gemms))
    return refused


def _refusal(norm: Node, found: Uses, scope: Scope, legal: Legal, fp16: bool) -> str | None:
    consumers = found.gemms
    if not consumers:
        return "no GEMM reads it"
    if found.dtype == torch.float16 and not fp16:
        return "float16: the un-normalized operand may overflow (options['fp16_norms'] allows it)"
    for gemm in consumers:
        if (reason := legal(gemm)) is not None:
            return f"its GEMM {gemm.name} is not fused: {reason}"
    x = norm.args[0]
    source = producer(x)
    if source is None:
        return "its input is not made by a GEMM"
    if (reason := legal(source)) is not None:
        return f"the GEMM that makes its input, {source.name}, is not fused: {reason}"
    region = grow((source,), scope)
    if x not in region.values or not same(fake(x).shape[-1], region.shape[1]):
        return f"its input is not made in the epilogue of {source.name}"
    return None


def _defer(graph: Graph, norm: Node, found: Uses, scope: Scope) -> None:
    x, weight, eps, _ = norm.args
    wide = torch.promote_types(fake(x).dtype, torch.float32)
    put = Put(graph, like=norm, pattern=("rms_norm", norm.name))
    with graph.inserting_before(norm):
        xw = put.cast(x, wide)
        mean = put(aten.mean.dim, put(aten.mul.Tensor, xw, xw), [-1], True)
        rstd = put(aten.rsqrt.default, put(aten.add.Tensor, mean, eps))
        flat = put(aten.reshape.default, rstd, [-1, 1])
        h = xw if weight is None else put(aten.mul.Tensor, xw, put.cast(weight, wide))
        h = stored = put.cast(h, found.dtype)
        h = put(aten.reshape.default, h, [-1, fake(x).shape[-1]])
    gradients = found.products()
    products = {gemm: _scale(graph, gemm, h, flat, wide, norm) for gemm in found.gemms}
    known = None if gradients is None else [(products[g], dz) for g, dz in gradients.items()]
    if known is not None and not all(_at_hand(z, scope) for z, _ in known):
        known = None
    # Without the dot, a kernel behind the dgrad finishes dx. It reads x, and makes h of it as well.
    stored.meta[KEEP] = known is not None
    differentiate(graph, found, Scales(h, rstd, flat), known)
    prune(list(norm.users))


def _at_hand(z: Node, scope: Scope) -> bool:
    """Is the product ``z`` in memory in the backward pass anyway? Queries and keys are not: what
    attention reads are their rotations."""
    _, users = readers(z, through=lambda u: u.target in ALIASES or u.target is aten.permute.default)
    return any(user not in scope.forward for user in users)


def _scale(graph: Graph, gemm: Node, h: Node, rstd: Node, wide: torch.dtype, norm: Node) -> Node:
    """``gemm(n, W)`` becomes ``gemm(h, W) * rstd``; a bias is added behind the scale. Returns what
    takes the place of ``gemm``."""
    dtype = fake(gemm).dtype
    put = Put(graph, like=gemm, pattern=("rms_norm", norm.name))
    with graph.inserting_before(gemm):
        z = put(aten.mm.default, h, gemm_inputs(gemm)[1])
        z = put.cast(z, wide)
        z = put(aten.mul.Tensor, z, rstd)
        if gemm.target is aten.addmm.default:
            if (alpha := gemm.kwargs.get("alpha", 1)) != 1:
                z = put(aten.mul.Tensor, z, alpha)
            bias: Any = gemm.args[0]
            if (beta := gemm.kwargs.get("beta", 1)) != 1:
                bias = put(aten.mul.Tensor, bias, beta)
            z = put(aten.add.Tensor, z, bias)
        z = put.cast(z, dtype)
    gemm.replace_all_uses_with(z)
    inputs = gemm.all_input_nodes
    graph.erase_node(gemm)
    prune(inputs)
    return z
