# SPDX-License-Identifier: Apache-2.0
"""Which configs of a site are worth a measurement, most promising first."""

from __future__ import annotations

import math
from dataclasses import replace

from coda_inductor.select.config import Config, legal_configs
from coda_inductor.select.device import Gpu
from coda_inductor.select.model import kernel_us
from coda_inductor.select.site import Site

#: How many configs of a site are compiled and timed: by default, and where the user waits for it.
SOME, MANY = 6, 16
_PLAIN = Config(128, 128, 1, 1, True)
_UNKNOWN = 1.01


def candidates(site: Site, gpu: Gpu, most: int | None) -> list[Config]:
    """At most ``most`` legal configs of ``site`` (None: all of them), the most promising first."""
    legal = legal_configs(site.program, gpu.arch, site.terms)
    us = {config: _model(site, config, gpu) for config in legal}
    known = min(legal, key=us.__getitem__, default=None)
    if known is not None:
        best, of_best = us[known], _waste(site, known, gpu)
        for config in legal:
            if not math.isfinite(us[config]):  # of a tile that the model does not know
                us[config] = (best if math.isfinite(best) else 1.0) * _waste(site, config, gpu)
                us[config] /= of_best
    return sorted(legal, key=us.__getitem__)[:most]


def _model(site: Site, config: Config, gpu: Gpu) -> float:
    """Expected microseconds; of a config that the model does not know those of the one that differs
    only in how its tiles are handed out, and a little more."""
    known = kernel_us(site.program, config, site.m, site.n, site.k, site.terms, gpu)
    if math.isfinite(known):
        return known
    plain = replace(config, swizzle=_PLAIN.swizzle, dynamic=False)
    alike = kernel_us(site.program, plain, site.m, site.n, site.k, site.terms, gpu)
    return alike * _UNKNOWN


def _waste(site: Site, config: Config, gpu: Gpu) -> float:
    """Accumulator elements that the busiest processor computes, with what loading a tile's operands
    costs: the wider a tile, the more multiplications for each element of A and B."""
    columns = site.n * (2 if site.program.paired else 1)
    tiles = math.ceil(site.m / config.tile_m) * math.ceil(columns / config.tile_n)
    each = config.tile_m * config.tile_n
    loads = 1 + 64 * (1 / config.tile_m + 1 / config.tile_n)
    return math.ceil(tiles / gpu.processors) * each * loads
