# SPDX-License-Identifier: Apache-2.0
"""What a checkpointed block hands to the next is saved, be it a view or one of several outputs."""

from __future__ import annotations

import pytest
import torch
from passes import aten_graph, run_pass
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor import pipeline

(BORDERS,) = (each.run for each in pipeline.ON_ATEN if each.name == "borders")
AGAIN, SAVED = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def viewed(x):
    return x.sin().view(24).cos()


def sorted_cosines(x):
    values, indices = x.sort()
    return values.cos(), indices


#: Name -> (a function, the number of the checkpoint that its cosine lies in, where the rest lies in
#: 0, and node -> tag after the pass).
CASES = {
    "a view is saved as what it views": (viewed, 1, {"sin": SAVED, "view": None, "cos": AGAIN}),
    "one of several outputs takes the call and the others with it": (
        sorted_cosines, 1, {"sort": None, "getitem": None, "getitem_1": None, "cos": AGAIN},
    ),
    "no later block reads": (viewed, 0, dict.fromkeys(("sin", "view", "cos"), AGAIN)),
    "no view is left to torch": (lambda x: x.sin().cos(), 1, {"sin": AGAIN, "cos": AGAIN}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_later_block_reads_is_saved(name):
    function, block, tags = CASES[name]
    graph = aten_graph(function, torch.empty(4, 6))
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    for node in nodes:
        own = block if node.name == "cos" else 0
        node.meta |= {"recompute": AGAIN, "ac_graph_id": own}
    run_pass(BORDERS, graph)
    assert {node.name: node.meta["recompute"] for node in nodes} == tags
