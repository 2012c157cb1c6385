# SPDX-License-Identifier: Apache-2.0
"""Inductor's hook for the split into forward and backward pass (``custom_partitioner_fn``).

Without a :class:`~coda_inductor.memory.limit.Limit` it is torch's own partitioner. With one,
torch's partitioner names the tensors that are kept without recomputation, the planner chooses which
to compute again and marks these nodes (``CheckpointPolicy.MUST_RECOMPUTE``, as checkpoints do), and
torch's partitioner splits the graph by the marks. torch's own budgets cannot be used for that: its
solver chooses among single nodes whose price it cannot know, and recomputes cheap tensors of all
layers at once (docs/memory.md).
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor import compat
from coda_inductor.compat import min_cut_rematerialization_partition
from coda_inductor.errors import OptionError
from coda_inductor.graph.aliases import WRITTEN, names, old_values
from coda_inductor.graph.edit import Put
from coda_inductor.graph.layout import refresh
from coda_inductor.graph.nodes import aten, bytes_of, fake, may_view
from coda_inductor.graph.snapshots import snapshot
from coda_inductor.graph.walk import base
from coda_inductor.log import logger, say_once
from coda_inductor.memory.candidates import Stash
from coda_inductor.memory.halves import add_halves
from coda_inductor.memory.limit import Limit
from coda_inductor.memory.peak import Timeline
from coda_inductor.memory.planner import DOUBT, Chain, Choice
from coda_inductor.memory.updates import give, hold
from coda_inductor.plan import several_ranks
from coda_inductor.record import Record
from coda_inductor.report import MemoryReport, size_text

Split = tuple[GraphModule, GraphModule]
#: A share never asks for less than this part of a graph's inputs. A loss keeps a log-sum-exp, 32
#: KiB, which takes another pass over 2 GiB of logits.
_LITTLE = 1e-3


def usable() -> bool:
    """Does this torch have everything that our partitioner needs?"""
    return compat.CustomPartitionerFn is not object and not isinstance(
        min_cut_rematerialization_partition, type
    )


def installed() -> bool:
    """Is the partitioner of the current compilation ours? A user's own comes first."""
    return isinstance(getattr(compat.inductor_config, "custom_partitioner_fn", None), Partitioner)


class Partitioner(compat.CustomPartitionerFn):
    """Our partitioner, see the module docstring.

    Args:
        record: the record of the graph that is compiled now.
        key: everything that the result depends on, like a pass's ``uuid``.
    """

    def __init__(self, record: Callable[[], Record | None], key: Callable[[], Any]):
        self.record, self.key = record, key

    def __deepcopy__(self, _memo: Any) -> "Partitioner":
        return self  # as a pass

    def __reduce__(self) -> Any:
        return tuple, ((self.uuid(),),)  # some releases of torch pickle settings into their keys

    def uuid(self) -> Any:
        return self.key()

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Split:
        record = self.record()
        limit = None if record is None else record.limit
        budget: dict[str, float] = {}
        if record is not None and limit is not None:
            record.limit = None  # of this graph alone
            budget = {"activation_memory_budget": 1.0}
        if budget or old_values(gm.graph):
            gm.graph.eliminate_dead_code()
            # As torch's partitioner begins: marks are of these nodes.
            gm.graph = compat.fx_graph_cse(gm.graph)
        for node in old_values(gm.graph):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if record is not None and record.updates:
            held = hold(gm.graph, kwargs["num_fwd_outputs"], record.updates, record.inputs)
            logger.info("%s: %d weights are updated in the backward pass", record.name, held)
        with compat.functorch_config.patch(budget):
            if record is not None and limit is not None:
                mark(gm.graph, limit, record, joint_inputs, kwargs)
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        keep_old_inputs(forward, backward, kwargs["num_fwd_outputs"])
        give(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward


def keep_old_inputs(forward: GraphModule, backward: GraphModule, outputs: int) -> None:
    """Copy inputs that are written to after the forward pass has read them, where the backward pass
    reads them too. torch's partitioner, which takes the graph for functional, lets it read the new
    values (pytorch/pytorch pull 197039 is about recomputed ones).

    Before::

        forward: y = x @ w; copy_(w, new); return y, w          backward: dx = dy @ w.T

    After::

        forward: y = x @ w; old = clone(w); copy_(w, new); return y, old
    """
    output = forward.graph.output_node()
    kept = [n for n in output.args[0][outputs:] if isinstance(n, Node)]
    written = [n for n in kept if base(n, may_view).meta.get(WRITTEN)]
    first = next(n for n in forward.graph.nodes if n.op != "placeholder")
    for value in written:
        before = first if value.op == "placeholder" else value.next
        copy = Put(value, before)(aten.clone.default, value)
        kept = [copy if n is value else n for n in output.args[0][outputs:]]
        output.args = ((*output.args[0][:outputs], *kept),)
        (reads,) = (n for n in backward.graph.nodes if n.name == value.name)
        reads.meta["val"] = fake(copy)
        for name in sorted(names(reads)):
            refresh(name)
    forward.recompile()


def mark(
    graph: Graph, limit: Limit, record: Record, joint_inputs: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Mark the nodes of the joint graph that are computed again, and note them in the record.

    Raises:
        OptionError: no choice stays within the option ``memory``; names the least peak.
    """
    outputs = kwargs["num_fwd_outputs"]
    gpu = record.plan.gpu
    stock = Stash.of(limit.before.graph, outputs, _saved(limit.before, joint_inputs, kwargs))
    little = _LITTLE * bytes_of(*graph.find_nodes(op="placeholder"))
    allowed = max(limit.share * bytes_of(*stock.tensors), little)
    names = _saved(GraphModule(graph.owning_module or {}, snapshot(graph)), joint_inputs, kwargs)
    stash = Stash.of(graph, outputs, names)
    stash.halves = add_halves(graph, stash.backward, gpu)
    chain = Chain(stash, gpu)
    timeline = Timeline(stash, [n for n in graph.output_node().args[0] if isinstance(n, Node)])

    def fits(choice: Choice) -> bool:
        if limit.room is not None and timeline.peak(choice.drop) > limit.room:
            return False
        return choice.kept <= allowed

    if limit.room is not None and not chain.many and several_ranks():
        say_once(
            "option 'memory' is a peak of one graph, and this one has few layers: blocks that are "
            "compiled one by one, as under FSDP2, need a share from 0 to 1 instead (docs/memory.md)"
        )
    # Also under a policy, time is spent for a lower peak only. The peak of a single block says
    # little: other blocks' tensors make the peak of the step.
    whole, least = chain.layers > 1, 0
    if limit.room is not None:  # what is predicted to fit counts
        least = chain.cut(timeline.peak)
    elif whole and not fits(chain[0]):
        chain.cut(timeline.peak, DOUBT)
    index = chain.first(fits)
    if index is None and limit.room is not None:
        raise OptionError(_too_little(limit, least))
    if index is None:  # a share: as little as possible
        index = len(chain) - 1
    choice = chain[chain.fastest(timeline.peak, index) if whole else index]
    drop = choice.drop
    saved = stash.after(drop)
    missing = [n for n in stash.forward if n.op == "call_function" and n not in saved]
    read = [n for n in missing if any(user in stash.backward for user in n.users)]
    for node in stash.rerun(read, drop) if drop.nodes else ():
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node, alone in stash.halves.items():
        if node in drop.halves:
            node.replace_all_uses_with(alone)
    peaks = timeline.peak(drop), timeline.peak(drop, held=True)
    graph.eliminate_dead_code()  # halves that nothing reads
    before = bytes_of(*stash.tensors)
    report = MemoryReport(choice.kept, before, len(drop.nodes), choice.ms, *peaks)
    record.report.memory = report
    logger.info("%s: memory: %s", record.name, report)


def _too_little(limit: Limit, peak: int) -> str:
    assert limit.room is not None
    room, needed, more = map(size_text, (limit.room, peak, peak - limit.room))
    return (
        f"option 'memory': the step may take {room} beyond what the device holds now, but it needs "
        f"{needed} even if everything that can be is computed again: allow {more} more, or use a "
        "smaller batch"
    )


def _saved(gm: GraphModule, joint_inputs: Sequence[Any], kwargs: dict[str, Any]) -> set[str]:
    """The names of the tensors that torch's partitioner keeps. Consumes ``gm``."""
    forward, _ = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    results = forward.graph.output_node().args[0][kwargs["num_fwd_outputs"] :]
    return {n.name for n in results if isinstance(n, Node) and n.op != "placeholder"}
