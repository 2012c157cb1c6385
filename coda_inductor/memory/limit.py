# SPDX-License-Identifier: Apache-2.0
"""The user's limit on the memory that a forward pass keeps for its backward pass.

Each of three settings leads to a :class:`Limit`:

- ``options={"memory": ...}``: a peak in bytes, or a share from 0 to 1;
- ``torch._functorch.config.activation_memory_budget`` below 1: a share;
- a policy of selective checkpoints (``create_selective_checkpoint_contexts`` of
  ``torch.utils.checkpoint``): the bytes that torch would keep under it.

A share refers to the memory that torch.compile keeps without us and without recomputation, so that
one value means the same memory under both backends. A policy's marks say which ops are kept. They
are limits of memory, not orders about kernels: with them a fused GEMM would be cut at every mark.
So the marks are removed before the rewrites, and the planner keeps as many bytes where that
costs least, or more where the peak is no higher.

Checkpoints without a policy keep nothing but their inputs; they stay as they are, unless the option
``memory`` says more.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor.compat import functorch_config
from coda_inductor.graph.sides import training
from coda_inductor.graph.snapshots import snapshot
from coda_inductor.rewrite.decompose import decompose

_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@dataclass(frozen=True)
class Limit:
    """The memory that a graph may keep.

    Attributes:
        before: the joint graph without our passes, from which torch's partitioner computes the
            memory that is kept without us.
        share: a share of that memory; 1.0 if ``room`` or marks in ``before`` are the limit.
        room: the most bytes that the step may take beyond the device's memory in use at compile
            time; None without such a limit.
    """

    before: GraphModule
    share: float = 1.0
    room: int | None = None


def limit(graph: Graph, setting: float | str | None, room: int | None) -> Limit | None:
    """The limit of the joint graph ``graph``, before any rewrite, or None. Removes the marks of
    checkpoints that the planner replaces. ``setting``: the option ``memory``; ``room``: the bytes
    that it leaves a step if it is a peak."""
    if not training(graph):
        return None
    marks = [n for n in graph.nodes if n.meta.get("recompute") is not None]
    selective = any(n.meta["recompute"] in _SAVED for n in marks)
    share = min(1.0, getattr(functorch_config, "activation_memory_budget", 1.0))
    if room is None and not isinstance(setting, float):
        setting = None
    if setting is None and share >= 1 and not selective:
        return None
    before = snapshot(graph)
    decompose(before)
    owner = graph.owning_module
    module = GraphModule({} if owner is None else owner, before)
    for node in marks if selective or setting is not None else ():
        node.meta["recompute"] = None
    if isinstance(setting, float):
        return Limit(module, min(share, setting))
    return Limit(module, share, room)
