# SPDX-License-Identifier: Apache-2.0
"""A product of concatenated columns is a sum of products.

Before (FLUX's single block: attention and MLP, M x K1 and M x K2, read by one projection)::

    y = addmm(bias, cat([a, gelu(x @ Wu)], 1), W)

After::

    y = addmm(bias, gelu(x @ Wu), W[K1:]) + a @ W[:K1]

Why it is valid: the sum over K is split; slices of W are views. Products after the first are
rounded to the GEMM's dtype, as other terms of a sum are.

Why it pays: an epilogue writes the columns of a concatenation to a tensor of their own, so that
another kernel must read and write all of them. Each further product is written and read instead,
which is less if it is narrower than half of the concatenation. The widest product comes first: its
epilogue adds the others, with all that follows, or a kernel of Inductor does, where that is
expected to be faster.

Refuses: a concatenation with other readers (a weight's gradient), or without a part that an
epilogue computes and is expected to win by; products that are no narrower; parts at which W cannot
be read in place. ``rewrite.fp8`` handles concatenations that are quantized as a whole.
"""

from typing import TYPE_CHECKING

from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put, replace
from coda_inductor.graph.gemms import bias_of, gemm_inputs, plain_bias, producer
from coda_inductor.graph.nodes import arguments, aten, fake
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import chain
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.decompose import decompose_pointwise

if TYPE_CHECKING:
    from coda_inductor.sites import Sites


def add_products(graph: Graph, record: Record) -> None:
    """Apply the rewrite to an aten graph, in place."""
    targets = (aten.mm.default, aten.addmm.default)
    gemms = [n for n in graph.nodes if n.target in targets]
    gemms = [n for n in gemms if any(map(producer, columns_of(gemm_inputs(n)[0])))]
    if gemms:
        decompose_pointwise(graph)  # a part may be gated
    scope = Scope(graph)
    for gemm in gemms:
        parts = columns_of(gemm_inputs(gemm)[0])
        if (why := _refusal(gemm, parts, scope, record)) is not None:
            record.refuse("concatenated", gemm, why)
            continue
        _split(gemm, parts)
        record.fire("concatenated")
        scope.refresh()


def columns_of(a: Node) -> list[Node]:
    """The parts whose concatenation along columns is the matrix ``a``; empty for other matrices."""
    joined = chain(a)[-1]
    if joined.target is not aten.cat.default:
        return []
    whole, args = fake(joined), arguments(joined)
    parts = [fake(part) for part in args["tensors"]]
    fits = all(p.dim() == whole.dim() and p.dtype == whole.dtype for p in parts)
    last = args["dim"] % whole.dim() == whole.dim() - 1
    fixed = all(isinstance(part.shape[-1], int) for part in parts)
    whole_rows = same(whole.shape[-1], fake(a).shape[-1])
    return list(args["tensors"]) if fits and last and fixed and whole_rows else []


def in_epilogue(parts: list[Node], scope: Scope, sites: "Sites") -> bool:
    """Does an epilogue, in a kernel that is expected to win, compute one of ``parts``?"""
    return any(
        maker is not None
        and sites.refusal(maker) is None
        and sites.absorbs(maker, part, scope, wins=True)
        for part, maker in zip(parts, map(producer, parts), strict=True)
    )


def _refusal(gemm: Node, parts: list[Node], scope: Scope, record: Record) -> Refusal | None:
    sites, (a, b) = record.sites, gemm_inputs(gemm)
    if (why := sites.refusal(gemm)) is not None:
        return why.excused()
    if bias_of(gemm) is not None and not plain_bias(gemm):
        return refuse("bias-form", "its bias or alpha/beta are not supported")
    if any(len(name.users) != 1 for name in chain(a)):
        return refuse("no-gain", "the concatenation is read elsewhere, so it is written anyway")
    if not in_epilogue(parts, scope, sites):
        return refuse("no-gain", "no epilogue computes a part of the concatenation")
    # Written and read: the concatenation; each product but the first, and the first one too where
    # no epilogue adds the others.
    if 2 * (len(parts) - 1) * fake(b).shape[1] > fake(a).shape[1]:
        text = "the products of the parts are no narrower than half of the concatenation"
        return refuse("no-gain", text)
    step = 16 // fake(a).element_size()
    if any(fake(part).shape[-1] % step for part in parts):
        return refuse("no-gain", "the parts of the weight would be copied to be aligned")
    return None


def _split(gemm: Node, parts: list[Node]) -> None:
    put, (_, weight), ends = Put(gemm), gemm_inputs(gemm), [0]
    for part in parts:
        ends.append(ends[-1] + fake(part).shape[-1])
    order = sorted(range(len(parts)), key=lambda i: ends[i] - ends[i + 1])
    left = [put.reshape(parts[i], [-1, ends[i + 1] - ends[i]]) for i in order]
    right = [put(aten.slice.Tensor, weight, 0, ends[i], ends[i + 1]) for i in order]
    first, *others = zip(left, right, strict=True)
    bias = bias_of(gemm)
    total = put(gemm.target, *(() if bias is None else (bias,)), *first)
    for pair in others:
        total = put.add(total, put(aten.mm.default, *pair))
    replace(gemm, total)
