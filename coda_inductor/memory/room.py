# SPDX-License-Identifier: Apache-2.0
"""The bytes that a step may take where the option ``memory`` is a peak or "fit".

They depend on what a device holds and on what other ranks can do. So they are known before a graph
is traced, when each rank comes by, with full caches or without, and are a part of the cache key.
Ranks agree once, through the store of their process group: with collectives, a rank that finds its
graph in a cache, or alone compiles again, would leave the others waiting.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch

from coda_inductor.compat import default_store
from coda_inductor.log import warn_once
from coda_inductor.plan import several_ranks

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
        try:
            known[setting] = _ask(store, setting, mine)
        except (RuntimeError, AttributeError) as error:  # a rank compiles nothing, or no store
            text = f"the ranks could not agree on a peak: {error}"
            warn_once("option 'memory'", text, to="this rank's own")
    return known[setting]


def _ask(store: Any, setting: int | str, mine: int) -> int:
    group = torch.distributed
    keys = [f"coda_inductor/room/{setting}/{rank}" for rank in range(group.get_world_size())]
    store.set(keys[group.get_rank()], str(mine))
    store.wait(keys, _PATIENCE)
    return min(int(store.get(key)) for key in keys)
