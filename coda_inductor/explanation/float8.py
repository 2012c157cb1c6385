# SPDX-License-Identifier: Apache-2.0
"""What a model in FP8 does around its products: casts, and copies that turn a factor. Which of its
layers ``options["fp8"]`` takes, and which names in ``fp8_skip`` are none of theirs."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph

from coda_inductor.compat import tree_leaves
from coda_inductor.graph.nodes import aten, fake
from coda_inductor.report import Float8Layers
from coda_inductor.semantic.fp8 import FP8


def note(stock: Sequence[Graph], ours: Sequence[Graph]) -> str:
    """Casts to FP8, and copies of FP8 tensors, without and with our passes; empty without any.
    One op that casts a tensor in two layouts counts once."""
    (casts, copies), (casts_after, copies_after) = _around(stock), _around(ours)
    said = f"FP8: casts {casts} -> {casts_after}, copies that turn a factor "
    return f"{said}{copies} -> {copies_after}." if casts or casts_after else ""


def _around(graphs: Sequence[Graph]) -> tuple[int, int]:
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function"]
    made = [n for n in nodes if n.target is not operator.getitem and _fp8(fake(n))]
    copies = sum(n.target is aten.clone.default for n in made)
    return sum(not any(_fp8(fake(x)) for x in n.all_input_nodes) for n in made), copies


def layers_note(layers: Float8Layers) -> str:
    """How many of a model's layers are in FP8, and what may have been meant by names of none; empty
    without the option. A call that is explained has all its graphs in ``layers``."""
    paths = layers.quantized | layers.kept
    known = sorted(paths | {path.rpartition(".")[2] for path in paths})
    near = {p: difflib.get_close_matches(p, known, n=1) for p in layers.unmatched}
    meant = [f" The name nearest to {p!r} is {found[0]!r}." for p, found in near.items() if found]
    return f"{layers.summary}.{''.join(meant)}" if paths else ""


def _fp8(value: object) -> bool:
    leaves = tree_leaves(value)
    return any(isinstance(x, torch.Tensor) and x.dtype in FP8 and x.numel() != 0 for x in leaves)
