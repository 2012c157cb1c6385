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


def tagged(function, block_of) -> dict[str, object]:
    """Target -> tag after the pass; `block_of` says in which checkpoint a node lies."""
    graph = aten_graph(function, torch.empty(4, 6))
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    for node in nodes:
        node.meta |= {"recompute": AGAIN, "ac_graph_id": block_of(node)}
    run_pass(BORDERS, graph)
    return {node.name: node.meta["recompute"] for node in nodes}


def is_cosine(node):
    return int(node.name.startswith("cos"))


def test_a_view_that_a_later_block_reads_is_saved_as_what_it_views():
    tags = tagged(lambda x: x.sin().view(24).cos(), is_cosine)
    assert tags == {"sin": SAVED, "view": None, "cos": AGAIN}


def test_one_of_several_outputs_takes_the_call_and_the_others_with_it():
    def function(x):
        values, indices = x.sort()
        return values.cos(), indices

    tags = tagged(function, is_cosine)
    assert tags == {"sort": None, "getitem": None, "getitem_1": None, "cos": AGAIN}


@pytest.mark.parametrize("block", [0, 1])
def test_what_no_later_block_reads_stays(block):
    tags = tagged(lambda x: x.sin().view(24).cos(), lambda node: block)
    assert set(tags.values()) == {AGAIN}


def test_what_is_no_view_is_left_to_torch():
    tags = tagged(lambda x: x.sin().cos(), is_cosine)
    assert tags == {"sin": AGAIN, "cos": AGAIN}
