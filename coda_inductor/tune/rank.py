# SPDX-License-Identifier: Apache-2.0
"""Which configs of a site are worth a measurement, most promising first."""

from __future__ import annotations

import math

from coda_inductor.select.config import Config, legal_configs
from coda_inductor.select.device import Gpu
from coda_inductor.select.model import kernel_us
from coda_inductor.select.site import Site

#: How many configs of a site are compiled and timed: by default, and where the user waits for it.
SOME, MANY = 6, 16


def candidates(site: Site, gpu: Gpu, most: int | None) -> list[Config]:
    """At most ``most`` legal configs of ``site`` (None: all of them), the most promising first: by
    the model where it knows them, then by how well their tiles divide the work among the GPU's
    processors."""
    legal = legal_configs(site.program, gpu.arch, site.terms)
    order = sorted(legal, key=lambda config: (_model(site, config, gpu), _waste(site, config, gpu)))
    return order[:most]


def _model(site: Site, config: Config, gpu: Gpu) -> float:
    return kernel_us(site.program, config, site.m, site.n, site.k, site.terms, gpu)


def _waste(site: Site, config: Config, gpu: Gpu) -> float:
    """Accumulator elements that the busiest processor computes, with what loading a tile's operands
    costs: the wider a tile, the more multiplications for each element of A and B."""
    columns = site.n * (2 if site.program.paired else 1)
    tiles = math.ceil(site.m / config.tile_m) * math.ceil(columns / config.tile_n)
    each = config.tile_m * config.tile_n
    loads = 1 + 64 * (1 / config.tile_m + 1 / config.tile_n)
    return math.ceil(tiles / gpu.processors) * each * loads
