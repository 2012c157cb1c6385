# SPDX-License-Identifier: Apache-2.0
"""From captured graphs to an :class:`Explanation`."""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch.fx import Node

from coda_inductor.explanation.capture import Capture, Captured
from coda_inductor.explanation.result import Explanation, Saved
from coda_inductor.fuse.traffic import size
from coda_inductor.graph.gemms import TRACED, gemm_inputs
from coda_inductor.graph.nodes import fake, may_view, module_path
from coda_inductor.graph.sizes import hint
from coda_inductor.graph.walk import base
from coda_inductor.options import Options
from coda_inductor.plan import as_16_bits
from coda_inductor.select import gate
from coda_inductor.select.device import gpu_of
from coda_inductor.tracing import Traced


def build(name: str, found: Capture, options: Options) -> Explanation:
    """Put together what was captured of the model called ``name``."""
    graphs = found.graphs
    device = _device(graphs)
    result = Explanation(name, device, any(g.training for g in graphs), gpu_of(device).article)
    for captured in graphs:
        result.sites += captured.report.sites
        result.near_misses += captured.report.refusals
        result.saved_before += _saved(captured.stock)
        result.saved_after += _saved(captured.ours)
    result.notes = _notes(result, graphs, found.breaks, options)
    return result


def _device(graphs: list[Captured]) -> str:
    devices: Counter[str] = Counter()
    for captured in graphs:
        for graph in captured.stock.graphs:
            values = (fake(node) for node in graph.nodes)
            devices.update(v.device.type for v in values if isinstance(v, torch.Tensor))
    return devices.most_common(1)[0][0] if devices else "cpu"


def _saved(parts: Traced) -> list[Saved]:
    tensors: dict[Node, Node] = {}
    for node in parts.saved:
        root = base(node, _is_view)
        if root.op != "placeholder" and isinstance(fake(root), torch.Tensor):
            tensors.setdefault(root, node)
    return [
        Saved(
            node.name,
            module_path(root),
            tuple(hint(extent) for extent in fake(root).shape),
            str(fake(root).dtype).removeprefix("torch."),
            size(root),
        )
        for root, node in tensors.items()
    ]


def _is_view(node: Node) -> bool:
    """Is ``node`` a view, or a part of what a view returns?"""
    return may_view(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _notes(result: Explanation, graphs: list[Captured], breaks: str, options: Options) -> list[str]:
    notes = []
    if result.device != "cuda" and result.fused:
        text = (
            f"The tensors are on {result.device}, where no kernels run: what is shown as a kernel "
            "is legal, and runs as plain ops."
        )
        notes.append(f"{text} {_forecast(result, graphs, options)}")
    if not result.comparable:
        notes.append(
            f"Torch itself finds no gradient in this call on {result.device} tensors (it has none "
            "of a loss on meta), so that it keeps nothing to compare with. Make the "
            "model on a CPU, where explain runs nothing of it either."
        )
    if breaks:
        reason = " ".join(breaks.split("\n", maxsplit=1)[0].split())
        notes.append(
            f"The model breaks into {len(graphs)} graphs, which splits idioms as it splits any "
            f"fusion. The first break: {reason}"
        )
    return notes


def _forecast(result: Explanation, graphs: list[Captured], options: Options) -> str:
    """What the GPU would make of it, by the costs that the gate asks for."""
    gpu = gpu_of(result.device)
    small = gate.host_bound(_shapes(graphs), gpu, training=result.training)
    if options.gate == "auto" and small is not None:
        return f"On {result.gpu} the gate would leave all of it to Inductor: {small}."
    estimates = [s.estimate for s in result.fused if s.estimate]
    kernels = sum(estimate.refusal is None for estimate in estimates)
    return f"On {result.gpu} {kernels} of these {len(estimates)} would run as kernels."


def _shapes(graphs: list[Captured]) -> list[tuple[int, int, int]]:
    nodes = [n for captured in graphs for graph in captured.stock.graphs for n in graph.nodes]
    pairs = [(fake(n), fake(gemm_inputs(n)[1])) for n in nodes if n.target in TRACED]
    return [(hint(y.shape[0]), hint(b.shape[-1]), as_16_bits(b)) for y, b in pairs]
