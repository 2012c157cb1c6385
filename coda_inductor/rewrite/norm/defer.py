# SPDX-License-Identifier: Apache-2.0
"""Apply norms after the GEMMs that read them, if that is valid and pays.

Before and after (``forward`` and ``backward`` have the algebra and its proof)::

    x = x0 + y @ Wo;  n, scale = norm(x, gamma, eps);  z = n @ W           (for every consumer)
    x = x0 + y @ Wo;  h = x * gamma;  scale = of sums over x;  z = (h @ W) * scale

Why it pays: no normalized tensor is stored. The epilogue that computes x computes the sums and h
too; later epilogues apply the scale. A record for each norm (``semantic.norms``) defines its
statistics and its gradient: for RMSNorm, LayerNorm, and the norms of pattern files.

Refuses (the norm then stays as it was, for Inductor): x is not computed in a GEMM's epilogue
(``uses``), or comes from a collective; something other than a GEMM, or the gradient of its weight,
reads n; a consumer cannot be fused; float16, where the un-normalized h may overflow (unless
options["fp16_norms"]); a LayerNorm that ``pivot`` refuses; a LayerNorm in training, because the
sums for its gradient cost more than is saved (gotchas.md).
"""

import operator

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import prune
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import arguments, fake, is_cast, label, locate, renames
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.walk import readers
from coda_inductor.log import logger
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, failed, refuse
from coda_inductor.rewrite.norm.backward import differentiate
from coda_inductor.rewrite.norm.forward import defer
from coda_inductor.rewrite.norm.pivot import Means
from coda_inductor.rewrite.norm.uses import Uses, input_refusal, uses
from coda_inductor.semantic.fp8 import quantize
from coda_inductor.semantic.norms import NORMS


def defer_norms(graph: Graph, record: Record) -> None:
    """Apply the rewrite where it is valid. A norm is counted when an epilogue absorbs its scale."""
    scope, means = Scope(graph), Means()
    for norm in [n for n in graph.nodes if n.target in NORMS]:
        name = NORMS[norm.target].name
        if not record.enabled(name) or _quantized(norm):
            continue
        try:
            result = _judge(norm, scope, means, record)
        except Exception as error:  # analysis only: nothing has been changed yet
            logger.debug("analysing %s failed", norm.name, exc_info=True)
            result = failed(error)
        if isinstance(result, Refusal):
            record.refuse(name, norm, result)
            means.stays(norm)
            continue
        x = arguments(norm)["x"]  # the norm is gone after this
        deferred, products = defer(norm, result, scope)
        differentiate(result, deferred, products, scope)
        if deferred.mean is not None:
            means.add(x, deferred.mean)
        prune(list(norm.users))
        scope.refresh()
        logger.debug("%s at %s waits for %d GEMMs", name, locate(norm), len(result.gemms))


def _quantized(norm: Node) -> bool:
    """Is the result of ``norm`` quantized? Without a shift, ``rewrite.fp8`` then decides."""

    def same(user: Node) -> bool:
        narrows = is_cast(user) and fake(user.all_input_nodes[0]).dtype == torch.float32
        return user.target is operator.getitem or renames(user) or narrows

    _, users = readers(norm, same)
    return NORMS[norm.target].mean is None and any(user.target is quantize for user in users)


def _judge(norm: Node, scope: Scope, means: Means, record: Record) -> Uses | Refusal:
    """The readers of ``norm``, or the reason why it stays."""
    result = uses(norm, scope)
    if isinstance(result, Refusal):
        return result
    why = _refusal(norm, result, scope, record)
    args, shifts = arguments(norm), NORMS[norm.target].mean is not None
    if why is not None or (not shifts and args.get("bias") is None):
        return why or result
    if shifts:
        rounded = record.plan.rounds(fake(gemm_inputs(result.gemms[0])[0]))
        pivot = means.choose(norm, result.dtype, rounded)
        if isinstance(pivot, Refusal):
            return pivot
        result.pivot = pivot
    vector, width = args["weight" if shifts else "bias"], fake(args["x"]).shape[-1]
    vectors = 1 if vector is None else fake(vector).numel() // width
    return record.plan.norm_loses(result.gemms, vectors) or result


def _refusal(norm: Node, result: Uses, scope: Scope, record: Record) -> Refusal | None:
    """The refusal of the first general condition that does not hold, or None."""
    gradient = f"{NORMS[norm.target].name}_backward"
    if result.backward is not None and not record.enabled(gradient):
        return refuse("disabled", f"options['disable'] names {gradient}")
    if not result.gemms:
        return refuse("no-gemm", "no GEMM reads it")
    if result.dtype == torch.float16 and not record.options.fp16_norms:
        return refuse(
            "float16-overflow",
            "float16: the un-normalized operand may overflow (options['fp16_norms'] allows it)",
        )
    for gemm in result.gemms:
        if (why := record.sites.refusal(gemm)) is not None:
            return why.within(f"{label(gemm)} reads it and is not fused: {{}}")
    return input_refusal(norm, scope, record)
