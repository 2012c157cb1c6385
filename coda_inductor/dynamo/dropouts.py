# SPDX-License-Identifier: Apache-2.0
"""Low-rank linear layers behind dropouts of one input (LoRA's ``A``, as peft and torchtune write
them) become one op that draws the masks while it reads the input.

Before (A_i (r, K); each dropout has a mask of its own)::

    h = linear(dropout(x, p), A_0);  g = linear(dropout(x, p), A_1)

After::

    seed = randint(0, 2**63 - 1, (1,))                                    one per graph or region
    h, g = dropout_linear(x, cat([A_0, A_1]), seed, 0, 2, p).split(r, -1)

Why it is valid: the masks are as independent and as probable as before (``semantic.dropout``).
torch's own generator draws the seed, so that ``manual_seed`` repeats a run and each step has masks
of its own. Which masks a seed stands for differs, as it does between eager and torch.compile.

Why it pays: a dropout writes a masked x, which is kept for the backward pass: seven times a layer.
Here x is read once for all layers that share it, and the backward pass draws the masks again.

Layers of one x, p, rank and dtype share an op, at most ``MOST`` and ``LOW_RANK`` columns. A cast of
x in between (peft's, to float32) becomes the op's own. Leaves alone: dropout without a mask (p = 0,
evaluation); wide layers.

Refuses: a masked x that is read elsewhere too (DoRA); a bias; a p of 1, or a p that is not a
number; few rows; in-place or mode changes between a dropout and its layer; float64 on a GPU;
devices without kernels, unless ``options["reference"]`` is set;
``torch._inductor.config.fallback_random``, which asks for eager's masks.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import getitem

import torch
from torch.fx import Graph, Node

from coda_inductor.compat import inductor_config
from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import LOW_RANK, LOW_RANK_RATIO
from coda_inductor.graph.layout import seen
from coda_inductor.graph.nodes import arguments, fake, is_cast, plain
from coda_inductor.graph.read import Call, op_name, read
from coda_inductor.graph.sizes import hint
from coda_inductor.graph.walk import widens
from coda_inductor.matching import Hazards, bodies, forward_mode, move
from coda_inductor.program.dtypes import FLOATS
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.dropout import DRAWS, FORWARD, dropped

#: The most layers of one op: its kernel holds a gradient of each.
MOST = 4
#: The least number of rows of x: reading fewer is faster than starting a kernel.
LEAST = 1024


def multiply_masks(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its regions, in place. Each layer counts or is refused."""
    dual = forward_mode(graph)
    for body in bodies(graph):
        groups: dict[tuple[Node, float, int, torch.dtype], list[Node]] = defaultdict(list)
        hazards = Hazards(body.graph)
        for node in [n for n in body.graph.nodes if op_name(n) == "dropout"]:
            call = read(node)
            layers = [user for user in node.users if _low_rank(user, node)]
            if call is None or not layers or call["training"] is False or call["p"] == 0:
                continue
            if (why := dual or _refusal(call, layers, record, hazards)) is not None:
                record.refuse("adapter_dropout", layers[0], why)
                continue
            weight = fake(arguments(layers[0])["weight"])
            x = _source(call["input"], layers[0], hazards)
            groups[x, call["p"], weight.shape[0], weight.dtype].append(layers[0])
        seeds: dict[torch.device, Node] = {}
        number = 0  # of masks
        for (x, p, rank, _), layers in groups.items():
            most = max(1, min(MOST, LOW_RANK // max(16, rank)))
            for part in _batches(layers, most, hazards):
                _replace(x, p, part, seeds, number)
                number += len(part)
                record.fire("adapter_dropout", len(part))


def _low_rank(layer: Node, dropout: Node) -> bool:
    if op_name(layer) != "linear" or arguments(layer)["input"] is not dropout:
        return False
    weight = fake(arguments(layer)["weight"])
    if weight is None or weight.dim() != 2:
        return False
    rank, width = map(hint, weight.shape)
    return 0 < rank <= LOW_RANK and LOW_RANK_RATIO * rank <= width


def _refusal(call: Call, layers: list[Node], record: Record, hazards: Hazards) -> Refusal | None:
    node, p = call.node, call["p"]
    layer = arguments(layers[0])
    tensors = plain(node, call["input"], layer["weight"], layers[0])
    if tensors is None:
        return refuse("idiom-form", "not all of its tensors are plain tensors")
    device, (rank, width) = tensors[0].device, tensors[2].shape
    if len(node.users) > 1:
        return refuse("dropout-shared", f"{node.name}, its masked input, is read elsewhere too")
    if call.get("inplace") or layer["bias"] is not None or tensors[0].dim() < 2:
        return refuse("dropout-form", "a dropout in place, a bias, or an input of one dimension")
    if not isinstance(p, float) or not 0 < dropped(p) < DRAWS:
        return refuse("dropout-form", f"p={p} is no probability between 0 and 1")
    if not isinstance(rank, int) or not isinstance(width, int):
        return refuse("symbolic-features", "the shape of its weight is symbolic")
    if inductor_config.fallback_random:
        return refuse("dropout-eager", "torch._inductor.config.fallback_random is set")
    if device.type != "cuda" and not (record.options.reference or record.dry):
        return refuse("no-kernels-on-device", f"{device.type} has no kernel that draws masks")
    dtype = tensors[3].dtype
    if dtype not in FLOATS or (dtype == torch.float64 and device.type == "cuda"):
        return refuse("kernel-dtype", f"its kernel does not compute in {dtype}")
    if hint(tensors[0].numel()) < LEAST * width:
        return refuse("too-small", f"it has fewer than {LEAST} rows")
    if hazards.between([node, layers[0]]):
        return refuse("mutation", "something changes between its dropout and it")
    return None


def _source(x: Node, layer: Node, hazards: Hazards) -> Node:
    """The tensor that the op reads for ``layer``, whose input is ``x`` under a mask. A cast is
    skipped if the op rounds to the same numbers."""
    while is_cast(x):
        exact = widens(x) or fake(x).dtype == fake(layer).dtype
        if not exact or hazards.between([x, layer]):
            break
        x = x.all_input_nodes[0]
    return x


def _batches(layers: list[Node], most: int, hazards: Hazards) -> list[Sequence[Node]]:
    """Groups of ``layers`` that one op may compute, at the group's first layer."""
    calls = [arguments(layer) for layer in layers]
    movable = all(call["weight"] < layers[0] for call in calls)
    nodes = [*(call["input"] for call in calls), *layers]
    if not movable or not hazards.private(layers) or hazards.between(nodes) or seen(layers):
        most = 1
    return [layers[i : i + most] for i in range(0, len(layers), most)]


def _replace(
    x: Node, p: float, layers: Sequence[Node], seeds: dict[torch.device, Node], first: int
) -> None:
    """Insert the op before the first of ``layers``, and let it replace them and their dropouts;
    ``first``: the number of its first mask."""
    put, like = Put(layers[0]), fake(layers[0])
    if like.device not in seeds:
        start = next(n for n in layers[0].graph.nodes if n.op != "placeholder")
        random = Put(layers[0], start)
        seeds[like.device] = random(torch.randint, 0, 2**63 - 1, (1,), device=like.device)
    weights = [put.cast(arguments(layer)["weight"], like.dtype) for layer in layers]
    joined = weights[0] if len(weights) == 1 else put(torch.cat, weights)
    product = put(FORWARD, x, joined, seeds[like.device], first, len(layers), p)
    results = [product]
    if len(layers) > 1:
        cut = put(torch.split, product, fake(layers[0]).shape[-1], -1)
        results = [put(getitem, cut, i) for i in range(len(layers))]
    for layer, result in zip(layers, results, strict=True):
        move(layer, result)
