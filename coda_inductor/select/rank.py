# SPDX-License-Identifier: Apache-2.0
"""Which configs of a site are worth a measurement, most promising first."""

from __future__ import annotations

import math

from coda_inductor.select.config import Config, legal_configs, usual
from coda_inductor.select.device import Gpu
from coda_inductor.select.figures import Figures
from coda_inductor.select.site import Site

#: How many configs of a site are compiled and timed: by default, and where the user waits for it.
SOME, MANY = 6, 16


def candidates(site: Site, gpu: Gpu, near: Figures | None = None) -> list[Config]:
    """All legal configs of ``site``: those that were measured where it was measured nearest, the
    fastest first, then a default, then those that leave the fewest processors idle."""
    legal = legal_configs(site.program, gpu.arch, site.terms)
    measured: list[Config] = []
    if near is not None:
        measured = sorted((c for c in legal if str(c) in near.us), key=lambda c: near.us[str(c)])
        best = near.best(map(str, legal))  # of equals the first in order
        measured.sort(key=lambda c: str(c) != best)
    wasted = sorted(legal, key=lambda c: _waste(site, c, gpu))
    default = [c for c in wasted if c in usual(site.program, gpu.arch)][:1]
    return list(dict.fromkeys((*measured, *(default or legal[:1]), *wasted)))


def _waste(site: Site, config: Config, gpu: Gpu) -> float:
    """Accumulator elements that the busiest processor computes, with what loading a tile's operands
    costs: the wider a tile, the more multiplications for each element of A and B."""
    columns = site.n * len(site.program.accs)
    tiles = math.ceil(site.m / config.tile_m) * math.ceil(columns / config.tile_n)
    each = config.tile_m * config.tile_n
    loads = 1 + 64 * (1 / config.tile_m + 1 / config.tile_n)
    return math.ceil(tiles / gpu.processors) * each * loads
