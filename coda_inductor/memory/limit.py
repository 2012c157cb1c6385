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

Checkpoints without a policy keep their inputs alone, and stay, unless ``memory`` says more.

The bytes that a peak or "fit" leaves a step (:func:`room`) depend on what a device holds and on
what other ranks can do. So they are known before a graph is traced, when each rank comes by, with
full caches or without, and are a part of the cache key. Ranks agree once, through the store of
their process group: with collectives, a rank that finds its graph in a cache, or alone compiles
again, would leave the others waiting.
"""

import datetime as dt
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from coda_inductor.compat import default_store, functorch_config
from coda_inductor.graph.sides import training
from coda_inductor.graph.snapshots import snapshot
from coda_inductor.log import warn_once
from coda_inductor.plan import several_ranks
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
    module = GraphModule(graph.owning_module or {}, before)
    for node in marks if selective or setting is not None else ():
        node.meta["recompute"] = None
    if isinstance(setting, float):
        return Limit(module, min(share, setting))
    return Limit(module, share, room)


#: The share of free memory that "fit" takes: the rest is for fragments and workspaces.
_FIT = 0.95
#: So many leading bits of a room count. Another process, whose device holds some bytes more or
#: less, then finds its graphs in the cache.
_BITS = 7
#: Ranks begin to compile about the same time.
_PATIENCE = dt.timedelta(minutes=3)
#: The store of the process group -> what its ranks agreed on, by the option's value.
_agreed: list[tuple[Any, dict[int | str, int]]] = []


def room(setting: int | str, device: torch.device) -> int:
    """Bytes that a step may take beyond what ``device`` holds: up to a peak of ``setting`` bytes,
    or ("fit") the free memory less a margin. Of several ranks the least one's at its first graph,
    because all should run the same kernels."""
    used = torch.cuda.memory_allocated(device)
    if setting == "fit":
        free, _ = torch.cuda.mem_get_info(device)
        mine = int(_FIT * (free + torch.cuda.memory_reserved(device) - used))
    else:
        mine = int(setting) - used
    shift = max(mine.bit_length() - _BITS, 0)
    mine = mine >> shift << shift
    return _least(setting, mine) if several_ranks() else mine


def _least(setting: int | str, mine: int) -> int:
    store = default_store()
    if not _agreed or _agreed[-1][0] is not store:
        _agreed[:] = [(store, {})]
    known = _agreed[-1][1]
    if setting not in known:
        known[setting] = mine
        group = torch.distributed
        keys = [f"coda_inductor/room/{setting}/{rank}" for rank in range(group.get_world_size())]
        try:
            store.set(keys[group.get_rank()], str(mine))
            store.wait(keys, _PATIENCE)
            known[setting] = min(int(store.get(key)) for key in keys)
        except (RuntimeError, AttributeError) as error:  # a rank compiles nothing, or no store
            text = f"the ranks could not agree on a peak: {error}"
            warn_once("option 'memory'", text, to="this rank's own")
    return known[setting]
