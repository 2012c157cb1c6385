# SPDX-License-Identifier: Apache-2.0
"""``scaled_dot_product_attention`` in Dynamo's graph: masks made of constants, and key/value heads
repeated for groups of query heads.

Before::

    mask = (arange(T)[:, None] >= arange(T)) & ...           # from constants only
    k4, v4 = (t[:, :, None].expand(B, H, n, T, D).reshape(B, H * n, T, D) for t in (k, v))
    sdpa(q, k4, v4, attn_mask=mask)

After::

    sdpa(q, k, v, is_causal=True, enable_gqa=True)

Why it is valid: the mask is evaluated, and every element equals the mask that ``is_causal`` (or no
mask) means, which is ``ones(T, T).tril()`` by torch's definition. That the repeated heads are the
repetition of ``enable_gqa`` is checked by running the graph's own views on indices.

Why it pays: with a mask tensor SDPA does not use its flash kernels, and repeated heads are written,
read and saved for the backward pass.

Refuses: a mask that depends on data (padding, packing) or on random numbers, is more than compared
indices where a size is symbolic, or is neither causal nor full (a sliding window shorter than the
sequence); causal attention with different numbers of queries and keys. Heads stay repeated where
flash attention would not run: not on CUDA, with a mask, in float32, or with more than 256 values
per head; and where an in-place op after the repetition may change the repeated tensor, or gradients
or autocast are switched before the call.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import unset_fake_temporarily
from coda_inductor.dynamo.attention.constants import Constants
from coda_inductor.graph.edit import Put, evaluate, run
from coda_inductor.graph.layout import seen
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.read import called, kind, op_name
from coda_inductor.graph.sizes import alike, hint, same
from coda_inductor.graph.walk import chain
from coda_inductor.matching import Body, Hazards, bodies, writes_to
from coda_inductor.program.dtypes import HALF
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, Refused, refuse

NAMES = ("constant_mask", "grouped_heads")
#: The dtypes in which undoing the repetition pays.
GROUPS_ON = "cuda"
#: The meaning of a mask, if it is one of the two for which SDPA has a flag.
CAUSAL, FULL = "causal", "full"
Verdict = str | Refusal
#: By mask and by the numbers of queries and keys, as texts, because SymInts have no hash.
Verdicts = dict[tuple[Node, str, str], Verdict]

TENSORS = ("query", "key", "value")
_MAX_HEAD = 256
#: Kinds of ops that only rearrange or repeat the elements of one tensor.
_MOVES = ("names", "turns", "repeats", "copies", "selects")


def simplify_attention(graph: Graph, record: Record) -> None:
    """Simplify masks and repeated heads of attention in ``graph`` and its regions, in place."""
    constants: dict[Body, Constants] = {}
    verdicts: Verdicts = {}
    for body in bodies(graph):
        outer = None if body.around is None else constants[body.around]
        constants[body] = Constants(body, outer)
        _simplify(body.graph, constants[body], verdicts, record)


def _simplify(graph: Graph, constants: Constants, verdicts: Verdicts, record: Record) -> None:
    hazards = Hazards(graph)
    for node in list(graph.nodes):
        arguments = arguments_of(node)
        if arguments is None:
            continue
        mask = arguments.get("attn_mask")
        if mask is not None and record.enabled("constant_mask"):
            verdict = _verdict(node, arguments, constants, verdicts)
            flags = {"attn_mask": None, "is_causal": verdict == CAUSAL}
            stays = isinstance(verdict, Refusal)
            why = verdict if stays else _moved(node, arguments | flags)
            if isinstance(why, Refusal):
                record.refuse("constant_mask", node, why.within("its mask stays: {}"))
            else:
                arguments |= flags
                record.fire("constant_mask")
        if _flash(arguments) and (heads := grouped(node, arguments, hazards, record)):
            arguments["key"], arguments["value"] = heads
            arguments["enable_gqa"] = True
        node.args = tuple(arguments.pop(name) for name in TENSORS)
        node.kwargs = arguments


def _moved(call: Node, arguments: dict[str, Any]) -> Refusal | None:
    """The reason why the result of ``call`` must lie in memory as it does, if with ``arguments`` it
    would not: SDPA's kernels differ in that."""
    why = seen([call])
    if why is None or alike(evaluate(call.target, (), arguments, like=call), fake(call)):
        return None
    return why


def arguments_of(node: Node) -> dict[str, Any] | None:
    """The arguments of an SDPA call, by name; None for others, or with fewer than 3 dimensions."""
    call = called(node, "scaled_dot_product_attention")
    tensors = [] if call is None else [fake(call[name]) for name in TENSORS]
    if call is None or not all(isinstance(t, torch.Tensor) and t.dim() >= 3 for t in tensors):
        return None
    return call.args


def _verdict(
    call: Node, arguments: dict[str, Any], constants: Constants, verdicts: Verdicts
) -> Verdict:
    mask = arguments["attn_mask"]
    if not isinstance(mask, Node) or not isinstance(fake(mask), torch.Tensor):
        return refuse("mask-form", "it is not a tensor of this graph")
    if arguments.get("is_causal"):
        return refuse("mask-form", "is_causal is set too")
    query, key = (fake(arguments[name]) for name in ("query", "key"))
    if widened(fake(call), query, key):
        return refuse("mask-shape", "scores are broadcast to it")
    mask, constants = constants.home(mask)  # evaluated once for all layers
    lengths = query.shape[-2], key.shape[-2]
    case = mask, *map(str, lengths)
    if case not in verdicts:
        try:
            verdicts[case] = classify(constants.value(mask), *lengths)
        except Refused as error:
            verdicts[case] = error.refusal
    return verdicts[case]


def widened(result: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """May ``result`` of attention have more rows or batches than its queries and keys? A larger
    mask causes that under compilation; eager SDPA raises."""
    batches = zip(*(reversed(t.shape[:-2]) for t in (result, query, key)), strict=False)
    return (
        result.dim() != query.dim()
        or not same(result.shape[-2], query.shape[-2])
        or not all(same(n, q) or same(n, k) for n, q, k in batches)
    )


def classify(mask: torch.Tensor, queries: Any, keys: Any) -> Verdict:
    """Classify a constant ``mask``, broadcastable to (..., queries, keys): :data:`CAUSAL`,
    :data:`FULL`, or why it is neither. True, or 0.0 in an additive mask, lets a query see a key;
    ``-inf``, or the dtype's lowest number, hides it."""
    visible = _visible(mask)
    if isinstance(visible, Refusal):
        return visible
    if visible.all():
        return FULL
    if not same(queries, keys):
        return refuse("mask-form", f"it is not full: {queries} queries but {keys} keys")
    causal = (positions := torch.arange(visible.shape[-1])) <= positions[:, None]
    if visible.shape[-2:] == causal.shape and torch.equal(visible, causal.expand_as(visible)):
        return CAUSAL
    return refuse("mask-form", "it is constant, but neither causal nor full")


def _visible(mask: torch.Tensor) -> torch.Tensor | Refusal:
    """The positions (bool) where ``mask`` lets a query see a key, or why they are undefined."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return refuse("mask-form", f"a mask of {mask.dtype} is neither boolean nor additive")
    visible = mask == 0
    if not (visible | (mask <= torch.finfo(mask.dtype).min)).all():
        return refuse("mask-form", "it adds numbers other than 0 and -inf")
    return visible


def _flash(arguments: dict[str, Any]) -> bool:
    """Would SDPA run flash attention on these arguments, without grouping heads already?"""
    query, key, val = (fake(arguments[name]) for name in TENSORS)
    return (
        arguments.get("attn_mask") is None
        and not arguments.get("enable_gqa")
        and query.device.type == GROUPS_ON
        and (query.dtype in HALF or GROUPS_ON == "cpu")
        and query.dim() == key.dim() == val.dim() == 4
        and key.shape[-1] == val.shape[-1] == query.shape[-1]
        and query.shape[-1] <= _MAX_HEAD
        and all(isinstance(t.shape[dim], int) for t in (query, key, val) for dim in (1, 3))
    )


#: A source (B, H, T, D); whether it is (B, T, H, D) instead; the views, last one first, that repeat
#: each of its heads n times in a row.
_Repetition = tuple[Node, bool, list[Node]]


def grouped(
    call: Node, arguments: Mapping[str, Any], hazards: Hazards, record: Record
) -> list[Node] | None:
    """The keys and values of ``call``, (B, H, T, D), before their heads were repeated. None if they
    were not, or if an in-place op after the repetition would change a view of them, but not a copy,
    or what attention saves for the backward pass."""
    repetitions = [_repetition(arguments[name]) for name in ("key", "value")]
    pair = [repetition for repetition in repetitions if repetition is not None]
    sources, between = [r[0] for r in pair], [node for r in pair for node in r[2]]
    if len(pair) < 2 or not same(*(tuple(fake(source).shape) for source in sources)):
        return None
    if not record.enabled("grouped_heads"):
        return None
    after = [node for node in hazards.writes if node > call]
    if hazards.between((*between, call)) or any(writes_to(node, sources) for node in after):
        text = "heads stay repeated: an in-place op or a mode change affects the repeated tensor"
        record.refuse("grouped_heads", call, refuse("heads-mutated", text))
        return None
    record.fire("grouped_heads")
    return [Put(call)("transpose", node, 1, 2) if swapped else node for node, swapped, _ in pair]


def _repetition(repeated: Any) -> _Repetition | None:
    """The source of ``repeated``; None if ``repeated`` is not a repetition of each head n times."""
    full: Any = fake(repeated).shape
    symbols = [n for n in full if not isinstance(n, int)]
    if not isinstance(full[1], int) or not all(n.node.has_hint() for n in symbols):
        return None
    views = chain(repeated, lambda n: kind(n) in _MOVES or op_name(n) == "getitem")
    for i, node in enumerate(views[1:], 1):
        tensor = fake(node)
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            continue
        for swapped in (False, True):
            shape: Any = (tensor.transpose(1, 2) if swapped else tensor).shape
            fewer = isinstance(shape[1], int) and shape[1] < full[1]
            fits = fewer and same((shape[0], *shape[2:]), (full[0], *full[2:]))
            if fits and _repeats(views[:i], tensor.shape, swapped, full):
                return node, swapped, views[:i]
    return None


def _repeats(views: list[Node], shape: torch.Size, swapped: bool, full: torch.Size) -> bool:
    """Do ``views`` (last first) repeat heads? They run on indices of a tensor, whose symbolic sizes
    are those that torch saw first: that the result has the full shape holds for all."""
    # One batch entry and one value per head would suffice, but the views have literal sizes.
    with unset_fake_temporarily():
        sizes = [hint(size) for size in shape]
        indices = torch.arange(math.prod(sizes), dtype=torch.int32).reshape(sizes)
        result: Any = indices
        for node in reversed(views):
            inputs = node.all_input_nodes
            values = {n: hint(fake(n)) for n in inputs if not isinstance(fake(n), torch.Tensor)}
            if len(inputs) - len(values) > 1:
                return False
            values |= dict.fromkeys(set(inputs) - values.keys(), result)
            args = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            result = run(node.target, *args)
        base = indices.transpose(1, 2) if swapped else indices
        n = full[1] // base.shape[1]
        return torch.equal(result, base.repeat_interleave(n, dim=1))
