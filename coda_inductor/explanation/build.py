# SPDX-License-Identifier: Apache-2.0
"""Build an :class:`Explanation` from captured graphs."""

from __future__ import annotations

import operator
from collections import Counter

from torch.fx import Node

from coda_inductor.explanation.capture import Captured
from coda_inductor.explanation.result import Explanation
from coda_inductor.gpu import Gpu
from coda_inductor.graph.nodes import bytes_of, may_view
from coda_inductor.graph.walk import base
from coda_inductor.tracing import Traced


def build(name: str, graphs: list[Captured], breaks: str, gpu: Gpu) -> Explanation:
    """The explanation of the model ``name`` with these graphs, as on ``gpu``. ``breaks``: the
    reason if there are several graphs."""
    devices = Counter(device for g in graphs for device in g.devices)
    device = devices.most_common(1)[0][0] if devices else "cpu"
    result = Explanation(name, device, any(g.traced.training for g in graphs), gpu.article)
    for captured in graphs:
        result.sites += captured.report.sites
        result.near_misses += captured.report.refusals
        result.saved_bytes_before += _saved_bytes(captured.stock)
        result.saved_bytes_after += _saved_bytes(captured.traced)
    result.notes = _notes(result, graphs, breaks)
    return result


def _saved_bytes(parts: Traced) -> int:
    """Each tensor counts once. Inputs, which exist anyway, do not."""
    roots = {base(node, _is_view) for node in parts.saved}
    return sum(bytes_of(root) for root in roots if root.op != "placeholder")


def _is_view(node: Node) -> bool:
    """Is ``node`` a view, or an item of a view's results?"""
    return may_view(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _notes(result: Explanation, graphs: list[Captured], breaks: str) -> list[str]:
    notes = []
    if result.device != "cuda":
        notes.append(
            f"The tensors are on {result.device}, where no kernels run: this is what would run on "
            f"{result.gpu}, from measurements on one (--gpu names another)."
        )
    notes += [f"Memory: it {g.report.memory}." for g in graphs if g.report.memory is not None]
    if breaks:
        reason = " ".join(breaks.split("\n", maxsplit=1)[0].split())
        notes.append(
            f"The model breaks into {len(graphs)} graphs, and idioms and fusions end at a break. "
            f"The first break: {reason}"
        )
    return notes
