# SPDX-License-Identifier: Apache-2.0
"""Apply norms after the GEMMs that read them, if that is valid and pays.

Before and after (``forward`` and ``backward`` have the algebra and its proof)::

    x = x0 + y @ Wo;  n, scale = norm(x, gamma, eps);  z = n @ W           (for every consumer)
    x = x0 + y @ Wo;  h = x * gamma;  scale = of sums over x;  z = (h @ W) * scale

Why it pays: no normalized tensor is stored. The epilogue that computes x computes the sums and h
too; later epilogues apply the scale. A record for each norm (``semantic.norms``) defines its
statistics and its gradient: for RMSNorm, and the norms of pattern files.

Refuses (the norm then stays as it was, for Inductor): x is not computed in a GEMM's epilogue
(``uses``), or comes from a collective; something other than a GEMM, or the gradient of its weight,
reads n; a consumer cannot be fused; float16, where the un-normalized h may overflow (unless
options["fp16_norms"]). LayerNorms are no semantic op: their deferral does not pay (gotchas.md).
"""

import operator

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import prune
from coda_inductor.graph.nodes import fake, is_cast, label, locate, renames
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.walk import readers
from coda_inductor.log import logger
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, failed, refuse
from coda_inductor.rewrite.norm.backward import differentiate
from coda_inductor.rewrite.norm.forward import defer
from coda_inductor.rewrite.norm.uses import Uses, input_refusal, uses
from coda_inductor.semantic.fp8 import quantize
from coda_inductor.semantic.norms import NORMS


def defer_norms(graph: Graph, record: Record) -> None:
    """Apply the rewrite where it is valid. A norm is counted when an epilogue absorbs its scale."""
    scope = Scope(graph)
    for norm in [n for n in graph.nodes if n.target in NORMS]:
        name = NORMS[norm.target].name
        if not record.enabled(name) or _quantized(norm):
            continue
        try:
            result = uses(norm, scope)
            if isinstance(result, Uses):
                result = _refusal(norm, result, scope, record) or result
        except Exception as error:  # analysis only: nothing has been changed yet
            logger.debug("analysing %s failed", norm.name, exc_info=True)
            result = failed(error)
        if isinstance(result, Refusal):
            record.refuse(name, norm, result)
            continue
        deferred, products = defer(norm, result, scope)
        differentiate(result, deferred, products, scope)
        prune(list(norm.users))
        scope.refresh()
        logger.debug("%s at %s waits for %d GEMMs", name, locate(norm), len(result.gemms))


def _quantized(norm: Node) -> bool:
    """Is the result of ``norm`` quantized? ``rewrite.fp8`` then decides."""

    def same(user: Node) -> bool:
        narrows = is_cast(user) and fake(user.all_input_nodes[0]).dtype == torch.float32
        return user.target is operator.getitem or renames(user) or narrows

    _, users = readers(norm, same)
    return any(user.target is quantize for user in users)


def _refusal(norm: Node, result: Uses, scope: Scope, record: Record) -> Refusal | None:
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
