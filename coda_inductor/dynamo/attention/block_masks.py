# SPDX-License-Identifier: Apache-2.0
"""Attention with a mask that no flag of SDPA expresses: blocks that the mask hides are skipped.

Before::

    mask = ...                          # from data: padding, packed documents; or a sliding window
    sdpa(q, k, v, attn_mask=mask)       # in each layer; reads the mask, computes hidden scores

After::

    lists = block_lists(mask)           # once
    flex_attention(q, k, v, block_mask=(lists, mask))      # in each layer

Why it is valid: the lists are computed from the mask at every call, so its content does not matter.
A block of scores is left out if the mask is all False there, and no mask is applied if it is all
True; elsewhere the mask is read. A row whose mask is all False is zero, and so are its gradients,
as in SDPA's kernels except cuDNN's for boolean masks (which then ignore the mask).

Why it pays: SDPA's kernels for masks compute every score, add a bias to it, and read that bias for
each head; ``docs/attention.md`` has measurements.

The batch and the numbers of queries and keys may be symbolic, if they are sizes of the mask, which
is asked for them at each call.

Refuses: dropout; a mask for each head; masks of numbers, which are added (ALiBi; 0 and -inf too);
other symbolic sizes; a mask that is changed in place after its creation; a region that is called
several times, which cannot take the lists as inputs; heads of less than 16 or more than 256 values,
or not a multiple of 8; other devices and dtypes than ``DEVICE`` and ``DTYPES``; and less work, over
all calls of one mask, than ``LEAST``, unless the gate is "always".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.dynamo.attention.blocks import attend, block_lists
from coda_inductor.dynamo.attention.calls import TENSORS, arguments_of, grouped, widened
from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import fake, plain
from coda_inductor.graph.sizes import hint, same
from coda_inductor.matching import Body, Hazards, bodies, forward_mode, move, writes_to
from coda_inductor.matching.bodies import subgraphs
from coda_inductor.program.dtypes import HALF
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse

NAME = "block_mask"
#: The device and dtypes for which FlexAttention has kernels of both directions.
DEVICE, DTYPES = "cuda", HALF
#: The least scores of all calls of one mask, and queries and keys of each, that pay for the lists.
LEAST, SHORTEST = 2**28, 1024
_HEADS = range(16, 257, 8)
#: The most elements of a mask: kernels count them in 32 bits.
INDICES = 2**31


#: (a graph, a node of an outer graph) -> the placeholder that passes the node in.
Placeholders = dict[tuple[Body, Node], Node]


def _hand(node: Node, home: Body, body: Body, inputs: Placeholders) -> Node:
    if body is home:
        return node
    if (body, node) not in inputs:
        assert body.around is not None, "home is an outer graph"
        outside = _hand(node, home, body.around, inputs)
        regions = [n for n in body.around.graph.nodes if body.module in subgraphs(n).values()]
        last = [n for n in body.graph.nodes if n.op == "placeholder"][-1]
        with body.graph.inserting_after(last):
            inside = inputs[body, node] = body.graph.placeholder(f"coda_{outside.name}")
        inside.meta["example_value"] = fake(outside)
        for region in regions:
            region.args = (*region.args, outside)
    return inputs[body, node]


@dataclass(frozen=True)
class _Site:
    """An attention call in the graph ``body``, and its boolean mask in the graph ``home``."""

    call: Node
    body: Body
    home: Body
    mask: Node

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The call's arguments, read again: the query may be the result of a replaced call."""
        arguments = arguments_of(self.call)
        assert arguments is not None, "a site has tensors"
        return arguments

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and of keys."""
        query, key, _ = (fake(self.arguments[name]) for name in TENSORS)
        return query.shape[2], key.shape[2]


def skip_blocks(graph: Graph, record: Record) -> None:
    """Rewrite the attention calls of ``graph`` and its checkpointed regions, in place."""
    dual = forward_mode(graph)
    groups: dict[tuple[Any, ...], list[_Site]] = {}
    for body in bodies(graph):
        for call in body.graph.nodes:
            arguments = arguments_of(call)
            if arguments is None or arguments.get("attn_mask") is None or not record.enabled(NAME):
                continue
            result = dual or _refusal(call, arguments) or _site(call, arguments, body)
            if isinstance(result, Refusal):
                record.refuse(NAME, call, result)
            else:
                lengths = map(str, result.lengths)  # a SymInt has no hash
                groups.setdefault((result.mask, *lengths), []).append(result)
    inputs: Placeholders = {}
    for group in groups.values():
        if (why := _too_small(group, record)) is None:
            _rewrite(group, inputs, record)
        else:
            for site in group:
                record.refuse(NAME, site.call, why)


def _refusal(call: Node, arguments: Mapping[str, Any]) -> Refusal | None:
    tensors = plain(*(arguments[name] for name in (*TENSORS, "attn_mask")), call)
    if tensors is None:
        return refuse("idiom-form", "not all of its tensors are plain tensors")
    query, key, val, mask, result = tensors
    if (why := _symbolic(query, key, val, mask)) is not None:
        return why
    if not isinstance(arguments["scale"], int | float | None):
        return refuse("mask-size", "its scale is symbolic")
    if query.device.type != DEVICE or mask.device != query.device:
        return refuse("mask-device", f"on {query.device.type} FlexAttention has no backward pass")
    if mask.dtype != torch.bool:
        return refuse("mask-form", f"it adds numbers of {mask.dtype} to the scores")
    if result.dtype not in DTYPES:
        return refuse("mask-dtype", f"in {result.dtype} FlexAttention is not known to be faster")
    if arguments.get("dropout_p"):
        return refuse("mask-dropout", "FlexAttention has no dropout")
    if arguments.get("is_causal"):
        return refuse("mask-form", "is_causal is set too")
    return _shapes(query, key, val, result)


def _symbolic(query: Any, key: Any, val: Any, mask: Any) -> Refusal | None:
    """Heads and their values must be numbers; the batch and the numbers of queries and keys may be
    symbols, if they are sizes of the mask."""
    numbers = [n for t in (query, key, val) for n in (t.shape[-1], *t.shape[-3:-2])]
    sizes = (*query.shape[:-3], query.shape[-2], key.shape[-2])
    own = (*mask.shape[:-3], *mask.shape[-2:])  # without heads
    symbols = [n for n in (*sizes, *mask.shape) if not isinstance(n, int)]
    if not all(isinstance(n, int) for n in numbers) or not all(n.node.has_hint() for n in symbols):
        return refuse("mask-size", "its size is symbolic")
    if symbols and not (same(own, sizes) or same(own, (1, *sizes[1:])) or same(own, sizes[1:])):
        return refuse("mask-size", "it is broadcast to a symbolic size")
    return None


def _shapes(query: Any, key: Any, val: Any, result: Any) -> Refusal | None:
    if query.dim() != 4 or key.dim() != 4 or val.dim() != 4:
        return refuse("mask-shape", "queries, keys and values do not all have 4 dimensions")
    if not all(t.numel() for t in (query, key, val)):
        return refuse("mask-small", "a tensor of it is empty")
    if widened(result, query, key):
        return refuse("mask-shape", "its scores are broadcast to the mask")
    apart = key.shape[:3] != val.shape[:3] or key.shape[0] != query.shape[0]
    if apart or query.shape[1] % key.shape[1]:
        return refuse("mask-shape", "its tensors are broadcast to each other")
    widths = query.shape[-1], val.shape[-1]
    if any(width not in _HEADS for width in widths):
        text = f"heads have {max(widths)} values, not a multiple of 8 from 16 to 256"
        return refuse("mask-form", text)
    return None


def _site(call: Node, arguments: Mapping[str, Any], body: Body) -> _Site | Refusal:
    mask, home = arguments["attn_mask"], body
    while mask in home.outer and home.around is not None:
        mask, home = home.outer[mask], home.around
    if home.around is not None and mask.op == "placeholder":
        return refuse("mask-region", "it is passed to a region that is called several times")
    if any(node > mask and writes_to(node, (mask,)) for node in home.graph.nodes):
        return refuse("mask-mutated", "an in-place op changes it")
    tensor = fake(mask)
    if tensor.dim() >= 3 and tensor.shape[-3] > 1 and not same(tensor.stride(-3), 0):
        return refuse("mask-heads", "each head has its own mask")
    site = _Site(call, body, home, mask)
    if math.prod((*site.lengths, *tensor.shape[:-3])) >= INDICES:
        return refuse("mask-form", f"it has more than {INDICES} elements")
    return site


def _too_small(group: list[_Site], record: Record) -> Refusal | None:
    queries, keys = map(hint, group[0].lengths)
    heads = sum(math.prod(map(hint, fake(site.arguments["query"]).shape[:2])) for site in group)
    if record.options.gate == "always":
        return None
    if min(queries, keys) >= SHORTEST and heads * queries * keys >= LEAST:
        return None
    text = f"{len(group)} calls with {queries} queries and {keys} keys gain less than lists cost"
    return refuse("mask-small", text)


def _rewrite(group: list[_Site], inputs: Placeholders, record: Record) -> None:
    mask, lengths = group[0].mask, group[0].lengths
    before = mask.next
    while before.op == "placeholder":
        before = before.next
    put = Put(mask, before)
    plane = put.traced(lambda mask: _plane(mask, fake(group[0].mask), lengths), mask)
    batched = fake(plane).dim() == 3
    lists = put.traced(lambda plane: block_lists(plane, batched), plane)
    for site in group:
        inside = [_hand(node, site.home, site.body, inputs) for node in (plane, *lists)]
        arguments = site.arguments
        heads = grouped(site.call, arguments, Hazards(site.call.graph), record)
        tensors = arguments["query"], *(heads or (arguments["key"], arguments["value"]))
        new = attend(site.call, tensors, arguments.get("scale"), inside[0], inside[1:])
        if (why := move(site.call, new)) is None:
            record.fire(NAME)
        else:
            record.refuse(NAME, site.call, why)


def _plane(mask: Any, tensor: Any, lengths: tuple[Any, Any]) -> Any:
    """``mask``, with the fake value ``tensor``, as (Tq, Tk), or as (B, Tq, Tk) if it differs within
    the batch. ``as_strided`` makes Inductor write it to memory: inside the kernels it could not
    compute what ``cat`` and ``pad`` become there. Repeated dimensions are not written."""
    once = mask
    for dim, size in enumerate(tensor.shape):
        known = isinstance(size, int) or dim < tensor.dim() - 2  # a symbolic length would be lost
        once = once.narrow(dim, 0, 1) if known and same(tensor.stride(dim), 0) else once
    once = once.contiguous()
    once = once.as_strided(once.shape, once.stride())
    sizes = (1,) * (4 - tensor.dim()) + (*tensor.shape[:-2], *lengths)
    batched = not same(sizes[0], 1) and not same(tensor.stride(0), 0)
    wide = once.expand([n if isinstance(n, int) else -1 for n in sizes])  # symbols are the mask's
    return wide[:, 0] if batched else wide[0, 0]
