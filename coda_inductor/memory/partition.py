# SPDX-License-Identifier: Apache-2.0
"""Inductor's hook for the split into forward and backward pass (``custom_partitioner_fn``).

Without a :class:`~coda_inductor.memory.limit.Limit` it is torch's own partitioner. With one,
torch's partitioner says what is kept without recomputation, the planner chooses what to compute
again, and marks on nodes (``CheckpointPolicy.MUST_RECOMPUTE``, as checkpoints set them) tell
torch's partitioner, which splits the graph. torch's own budgets cannot be used for that: its solver
chooses among single nodes whose price it cannot know, and recomputes at once what is cheap in all
layers (docs/memory.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor.compat import (
    CustomPartitionerFn,
    functorch_config,
    fx_graph_cse,
    inductor_config,
    min_cut_rematerialization_partition,
)
from coda_inductor.errors import OptionError
from coda_inductor.graph.nodes import bytes_of
from coda_inductor.graph.snapshots import snapshot
from coda_inductor.log import logger, say_once
from coda_inductor.memory.candidates import Freed, Kept
from coda_inductor.memory.halves import add_halves
from coda_inductor.memory.limit import Limit
from coda_inductor.memory.peak import Timeline
from coda_inductor.memory.planner import Chain, Choice
from coda_inductor.plan import several_ranks
from coda_inductor.record import Record
from coda_inductor.report import MemoryReport, size_text

Split = tuple[GraphModule, GraphModule]
#: A share never asks for less than this part of a graph's inputs. A loss keeps a log-sum-exp, 32
#: KiB, which takes another pass over 2 GiB of logits.
_LITTLE = 1e-3


def usable() -> bool:
    """Does this torch have what a partitioner of ours needs?"""
    return CustomPartitionerFn is not object and not isinstance(
        min_cut_rematerialization_partition, type
    )


def installed() -> bool:
    """Is the partitioner of the current compilation ours? A user's own comes first."""
    return isinstance(getattr(inductor_config, "custom_partitioner_fn", None), Partitioner)


class _Pickled(tuple):
    """What a pickled :class:`Partitioner` is: its key."""


class Partitioner(CustomPartitionerFn):
    """See the module docstring.

    Args:
        record: of the graph that is compiled now.
        key: what the result depends on, as a pass's ``uuid``.
    """

    def __init__(self, record: Callable[[], Record | None], key: Callable[[], Any]):
        self.record, self.key = record, key

    def __deepcopy__(self, _memo: Any) -> Partitioner:
        return self  # as a pass

    def __reduce__(self) -> Any:
        return _Pickled, ((self.uuid(),),)  # some releases of torch pickle settings into their keys

    def uuid(self) -> Any:
        return self.key()

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **how: Any) -> Split:
        record = self.record()
        limit = None if record is None else record.limit
        if record is None or limit is None:
            return min_cut_rematerialization_partition(gm, joint_inputs, **how)
        record.limit = None  # of this graph alone
        gm.graph.eliminate_dead_code()
        # As torch's partitioner begins: the plan is of these nodes.
        gm.graph = fx_graph_cse(gm.graph)
        with functorch_config.patch(activation_memory_budget=1.0):
            mark(gm.graph, limit, record, joint_inputs, how)
            return min_cut_rematerialization_partition(gm, joint_inputs, **how)


def mark(
    graph: Graph, limit: Limit, record: Record, joint_inputs: Sequence[Any], how: dict[str, Any]
) -> None:
    """Mark what is computed again in the joint graph ``graph``, and tell the record.

    Raises:
        OptionError: no choice stays within the option ``memory``; names the least peak.
    """
    outputs = how["num_fwd_outputs"]
    gpu = record.plan.gpu
    stock = Kept.of(limit.before.graph, outputs, _kept(limit.before, joint_inputs, how))
    little = _LITTLE * bytes_of(*graph.find_nodes(op="placeholder"))
    allowed = max(limit.share * bytes_of(*stock.kept), little)
    names = _kept(GraphModule(graph.owning_module or {}, snapshot(graph)), joint_inputs, how)
    kept = Kept.of(graph, outputs, names)
    kept.halves = add_halves(graph, kept.backward, gpu)
    chain = Chain(kept, gpu)
    timeline = Timeline(kept, [n for n in graph.output_node().args[0] if isinstance(n, Node)])

    def fits(found: Choice) -> bool:
        if limit.room is not None and timeline.peak(found.freed) > limit.room:
            return False
        return found.kept <= allowed

    # The peak of a single block says little: others' tensors make that of the step. A policy says
    # what is kept, whatever the peak.
    if limit.room is not None and not chain.many and several_ranks():
        say_once(
            "option 'memory' is a peak of one graph, and this one has few layers: blocks that are "
            "compiled one by one, as under FSDP2, need a share from 0 to 1 instead (docs/memory.md)"
        )
    whole = chain.layers > 1 and limit.share < 1
    least = chain.cut(timeline.peak) if limit.room is not None or whole else 0
    found = chain.first(fits)
    if found is None and limit.room is not None:
        raise OptionError(_too_little(limit, least))
    if found is None:  # a share: as little as possible
        found = chain[len(chain) - 1]
    freed = found.freed
    for node in kept.again(_read_by_backward(kept, freed), freed) if freed.gone else ():
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node, alone in kept.halves.items():
        if node in freed.halves:
            node.replace_all_uses_with(alone)
    peak = timeline.peak(freed)
    graph.eliminate_dead_code()  # halves that nothing reads
    said = MemoryReport(found.kept, found.before, len(freed.gone), found.ms, peak)
    record.report.memory = said
    logger.info("%s: memory: %s", record.name, said)


def _too_little(limit: Limit, peak: int) -> str:
    assert limit.room is not None
    room, needed, more = map(size_text, (limit.room, peak, peak - limit.room))
    return (
        f"option 'memory': the step may take {room} beyond what the device holds now, but it needs "
        f"{needed} even if everything that can be is computed again: allow {more} more, or use a "
        "smaller batch"
    )


def _read_by_backward(kept: Kept, freed: Freed) -> list[Node]:
    """What the backward pass reads of the forward pass and is not kept."""
    there = kept.there(freed)
    return [
        node
        for node in kept.forward
        if node.op == "call_function"
        and node not in there
        and any(user in kept.backward for user in node.users)
    ]


def _kept(gm: GraphModule, joint_inputs: Sequence[Any], how: dict[str, Any]) -> set[str]:
    """The names of what torch's partitioner keeps; consumes ``gm``."""
    forward, _ = min_cut_rematerialization_partition(gm, joint_inputs, **how)
    results = forward.graph.output_node().args[0][how["num_fwd_outputs"] :]
    return {n.name for n in results if isinstance(n, Node) and n.op != "placeholder"}
