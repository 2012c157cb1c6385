# SPDX-License-Identifier: Apache-2.0
"""A norm between GEMMs: the row scale moves past the GEMMs behind (R1), its statistics into the
GEMM in front (R2), and gamma is applied where the operand is stored.

Before::

    x = x0 + y @ Wo;  n, rstd = rms_norm(x, gamma, eps);  z = n @ W        (for every consumer)

After::

    x = x0 + y @ Wo;  h = x * gamma;  rstd = rsqrt(mean(x * x) + eps);  z = (h @ W) * rstd

Why it is valid: n = D_rstd (x * gamma), and (D_r X) W = D_r (X W). Nothing normalized is stored.
The backward pass of the norm is rewritten with it, see ``rewrite.norms_backward``. LayerNorm has
the same conditions and an algebra of its own, see ``rewrite.layer_norms``.

Refuses (the norm then stays as it was, for Inductor): x is not made in a GEMM's epilogue, so that
its statistics would cost a pass of their own; something other than a GEMM, or the gradient of its
weight, reads n; a consumer cannot be fused; float16, where the un-normalized h may overflow (unless
options["fp16_norms"]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, Node

from coda_inductor.fuse.grow import grow
from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.gemms import Legal, gemm_inputs, producer
from coda_inductor.graph.nodes import ALIASES, aten, fake, module_path, readers
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same
from coda_inductor.log import Failure, logger
from coda_inductor.rewrite.norm.consumers import KEEP, scale, wide_of
from coda_inductor.rewrite.norm.layer import Means, defer_layer_norm
from coda_inductor.rewrite.norm.layer import refusal as layer_norm_refusal
from coda_inductor.rewrite.norm.rms_backward import Scales, differentiate
from coda_inductor.rewrite.norm.uses import Uses, uses
from coda_inductor.semantic.norms import layer_norm, rms_norm

#: Norm -> what counts when it is deferred.
_NORMS = {rms_norm: "rms_norm", layer_norm: "layer_norm"}
#: (GEMMs behind a LayerNorm, training) -> why deferring it does not pay, or None.
Loses = Callable[[list[Node], bool], str | None]


def defer_norms(
    graph: Graph,
    legal: Legal,
    *,
    fp16: bool = False,
    loses: Loses | None = None,
    rounds: Callable[[torch.Tensor], bool] | None = None,
    disabled: Sequence[str] = (),
) -> dict[str, str]:
    """Apply the rewrite to every norm where it is valid; returns where -> refusal reason, where
    being the op's name and the norm's module path, or its node name if no module is known.

    ``legal`` says whether a GEMM's epilogue may be fused at all; ``loses`` why deferring a
    LayerNorm would cost more than it saves: it reads the weights behind it once more. ``rounds``
    says of a GEMM's left operand whether its product is rounded before the epilogue. Norms whose
    name is ``disabled`` are left alone.
    """
    refused: dict[str, str] = {}
    scope, means = Scope(graph), Means()
    for norm in [n for n in graph.nodes if n.target in _NORMS]:
        name = _NORMS[norm.target]
        if name in disabled:
            continue
        try:
            found = uses(norm, scope)
            if isinstance(found, Uses):
                found = _refusal(norm, found, scope, legal, fp16) or found
            if isinstance(found, Uses) and norm.target is layer_norm:
                left = fake(gemm_inputs(found.gemms[0])[0])
                rounded = rounds is not None and rounds(left)
                found = layer_norm_refusal(norm, found, means, rounded=rounded) or found
                if isinstance(found, Uses) and loses is not None:
                    found = loses(found.gemms, found.backward is not None) or found
        except Exception as error:  # analysis only: nothing has been changed yet
            logger.debug("analysing %s failed", norm.name, exc_info=True)
            found = Failure(f"{type(error).__name__} in our own passes: {error}")
        if isinstance(found, str):
            logger.debug("rewrite: %s at %s refused: %s", name, norm.name, found)
            if norm.target is layer_norm:
                means.note(norm)
            refused[f"{name} at {module_path(norm) or norm.name}"] = found
            continue
        if norm.target is layer_norm:
            defer_layer_norm(graph, norm, found, means)
        else:
            _defer(graph, norm, found, scope)
        scope.refresh(graph)
        logger.debug("rewrite: %s at %s deferred past %d GEMMs", name, norm.name, len(found.gemms))
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
    wide, pattern = wide_of(x), ("rms_norm", norm.name)
    put = Put(graph, like=norm, pattern=pattern)
    with graph.inserting_before(norm):
        xw = put.cast(x, wide)
        mean = put(aten.mean.dim, put(aten.mul.Tensor, xw, xw), [-1], True)
        rstd = put(aten.rsqrt.default, put(aten.add.Tensor, mean, eps))
        flat = put(aten.reshape.default, rstd, [-1, 1])
        h = xw if weight is None else put(aten.mul.Tensor, xw, put.cast(weight, wide))
        h = stored = put.cast(h, found.dtype)
        h = put(aten.reshape.default, h, [-1, fake(x).shape[-1]])
    gradients = found.products()
    products = {gemm: scale(graph, gemm, h, flat, pattern=pattern) for gemm in found.gemms}
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
