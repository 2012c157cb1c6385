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
So the marks are removed before the rewrites, and the planner keeps the same bytes where that costs
least.

Checkpoints without a policy keep nothing but their inputs; they stay as they are, unless the option
``memory`` says more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor.compat import functorch_config, unset_fake_temporarily
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.sides import training
from coda_inductor.graph.snapshots import snapshot
from coda_inductor.options import Options
from coda_inductor.plan import several_ranks
from coda_inductor.rewrite.decompose import decompose

#: The share of free memory that "fit" takes: the rest is for fragments and workspaces.
_FIT = 0.95
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


def limit(graph: Graph, options: Options) -> Limit | None:
    """The limit of the joint graph ``graph``, before any rewrite, or None. Removes the marks of
    checkpoints that the planner replaces."""
    if not training(graph):
        return None
    marks = [n for n in graph.nodes if n.meta.get("recompute") is not None]
    selective = any(n.meta["recompute"] in _SAVED for n in marks)
    share = min(1.0, getattr(functorch_config, "activation_memory_budget", 1.0))
    setting = options.memory
    room = _room(graph, setting) if isinstance(setting, (int, str)) else None
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


def _room(graph: Graph, setting: int | str) -> int | None:
    """Bytes that a step may take beyond the present use of the device: up to a peak of ``setting``
    bytes, or ("fit") the free memory less a margin for fragmentation. The minimum over all ranks,
    because their kernels must be the same. None for a part of a model on a CPU."""
    device = next((d for d in map(_device, graph.nodes) if d is not None), None)
    if device is None:
        return None
    used = torch.cuda.memory_allocated(device)
    if setting == "fit":
        free, _ = torch.cuda.mem_get_info(device)
        room = int(_FIT * (free + torch.cuda.memory_reserved(device) - used))
    else:
        room = int(setting) - used
    if several_ranks():
        with unset_fake_temporarily():
            least = torch.tensor(room, device=device)
            torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
            room = int(least)
    return room


def _device(node: Node) -> torch.device | None:
    value = fake(node)
    return value.device if isinstance(value, torch.Tensor) and value.is_cuda else None
