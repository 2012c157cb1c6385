# SPDX-License-Identifier: Apache-2.0
"""Linear layers of an unmodified model in FP8: ``options={"fp8": RECIPE}``.

Before::

    y = linear(x, W, b)

After::

    y = coda_inductor.fp8_linear(x, W, b, RECIPE, bfloat16)

AOTAutograd traces it, and its gradients, to the same ops as torchao's own modules (``rewrite.fp8``
raises both): the numbers are torchao's, and all later passes are the same.

It changes results: FP8 has 3 or 2 bits of mantissa. The user asked for that with the option.

Refuses layers that ``options["fp8_skip"]`` names, layers that are too small to gain (``too_small``;
``options["fp8_small"]`` includes them), features that are not multiples of 16, weights that are
computed, tensors that are not plain (DTensor), products in another dtype than bfloat16, and inputs
without rows (an expert that no token chose). The gradient of a weight, which sums over rows, stays
in bfloat16 if M is not a multiple of 16.
"""

from __future__ import annotations

import fnmatch
import math
import re
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.nodes import of_linear, place
from coda_inductor.graph.read import read, target_name
from coda_inductor.graph.sizes import at_least_one, same
from coda_inductor.graph.walk import base
from coda_inductor.log import warn_once
from coda_inductor.matching import bodies, forward_mode, is_cast, plain, value
from coda_inductor.options import Options
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.fp8_linear import MULTIPLE, RECIPES, fp8_linear, multiplies, too_small

#: The suffix that peft adds to the name of a layer that it wraps.
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)$")


def quantize_linears(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its regions, in place, with ``options["fp8"]``. Each layer
    counts, or has a reason. If the graph has layers and none is converted, a warning says why."""
    options, dual = record.options, forward_mode(graph)
    if not options.fp8 or not record.enabled("fp8_linear"):
        return
    left: list[Refusal] = []
    before = record.fired["fp8_linear"]
    for node in [n for body in bodies(graph) for n in body.graph.nodes]:
        if (layer := _layer(node)) is None:
            continue
        why = _refusal(node, layer, options)
        if dual is not None:
            why = refuse("forward-mode", f"{dual} uses forward-mode differentiation")
        if why is not None:
            record.refuse("fp8_linear", place(node), why)
            left.append(why.at("fp8_linear", place(node)))
            continue
        record.fire("fp8_linear")
        node.target, node.kwargs = fp8_linear, {}
        node.args = (*layer, options.fp8, value(node).dtype)
        trained = value(node).requires_grad and value(layer[1]).requires_grad
        why = _odd({"M": _rows(layer[0])}) if trained else None
        if why is not None and RECIPES[options.fp8].wgrad is not None:
            record.refuse("fp8_linear", place(node), why.within("its weight's gradient: {}"))
    unasked = [why for why in left if why.code != "fp8-skipped"]
    if unasked and record.fired["fp8_linear"] == before and not record.dry:
        why, count = unasked[0], len(left)
        text = f"it converts no layer of this graph: {why.text}. {why.remedy.text}"
        first = f"(first of {count} layers: {why.where})"
        warn_once("options['fp8']", text, to="the layers' own dtype", first=first)


def skips(pattern: str, path: str) -> bool:
    """Does ``pattern``, one of ``options["fp8_skip"]``, name the layer at ``path``? It may omit
    leading parts of the path, and the suffix of peft."""
    names = {path, _WRAPPED.sub("", path)}
    parts = [name.split(".") for name in names]
    ends = {".".join(part[i:]) for part in parts for i in range(len(part))}
    return any(fnmatch.fnmatchcase(end, pattern) for end in ends)


def _layer(node: Node) -> tuple[Node, Node, Node | None] | None:
    """The input, weight and bias of a linear layer: a product with a parameter, or an nn.Linear's.
    Other inputs of the graph are not weights: they may be another graph's results."""
    call = read(node) if target_name(node) == "linear" else None
    if call is None or value(call["weight"]).dim() != 2:
        return None
    parameter = isinstance(value(base(call["weight"], is_cast)), torch.nn.Parameter)
    if not parameter and not of_linear(node):
        return None
    return call["input"], call["weight"], call["bias"]


def _rows(x: Node) -> Any:
    return math.prod(value(x).shape[:-1])


def _refusal(node: Node, layer: tuple[Any, ...], options: Options) -> Refusal | None:
    path, recipe = place(node), RECIPES[options.fp8]
    for pattern in options.fp8_skip:
        if skips(pattern, path):
            return refuse("fp8-skipped", f"options['fp8_skip'] has {pattern!r}")
    if base(layer[1], is_cast).op not in ("placeholder", "get_attr"):
        return refuse("fp8-computed", "its weight is computed")
    known = plain(node, *layer[:2])
    if known is None:
        return refuse("not-recorded", "not all of its tensors are plain tensors")
    if known[0].dtype != torch.bfloat16:
        return refuse("fp8-dtype", f"it multiplies {known[0].dtype}, not bfloat16")
    n, k = known[2].shape
    if (why := _odd({"N": n, "K": k})) is not None:
        return why
    if too_small(options.fp8, n, k) and not options.fp8_small:
        text = f"N={n}, K={k} is too small to gain from {options.fp8}"
        return refuse("fp8-small", text)
    rows = _rows(layer[0])
    if same(rows, 0):
        return refuse("empty", "it multiplies no rows")
    if all(recipe.forward) or at_least_one(rows):
        return None
    return refuse("fp8-rows", f"M={rows} may be 0, and an empty tensor has no maximum")


def _odd(sizes: dict[str, Any]) -> Refusal | None:
    """Why FP8 does not multiply these sizes, or None."""
    for name, size in sizes.items():
        if not isinstance(size, int):
            return refuse("symbolic-features", f"{name} is symbolic")
        if not multiplies(size):
            return refuse("not-multiple-of-16", f"{name}={size} is not a multiple of {MULTIPLE}")
    return None
