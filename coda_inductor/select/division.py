# SPDX-License-Identifier: Apache-2.0
"""How a config divides the work of a site: what mostly explains which one is the fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from coda_inductor.graph.sizes import hint
from coda_inductor.program import EpilogueProgram
from coda_inductor.select.config import Config, mainloop_stages
from coda_inductor.select.device import Gpu


@dataclass(frozen=True)
class Division:
    """The tiles of one GEMM, and when they are worked on.

    Attributes:
        tiles: of the output, each one CTA's.
        waves: rounds in which all processors work on one tile each.
        last: the part of the processors that the last wave needs; what is missing to 1 is idle.
        stages: steps of K of A and B that are loaded ahead of the multiplications.
    """

    tiles: int
    waves: int
    last: float
    stages: int

    def __str__(self) -> str:
        """``1280 tiles in 10 waves, the last 70 % full; 4 steps of K in flight``."""
        tiles = f"{self.tiles} tiles in {self.waves} wave{'s' if self.waves > 1 else ''}"
        full = f"{'the last ' if self.waves > 1 else ''}{100 * self.last:.0f} % full"
        return f"{tiles}, {full}; {self.stages} steps of K in flight"


def divide(program: EpilogueProgram, config: Config, m, n: int, gpu: Gpu) -> Division:
    """How ``config`` divides ``program`` on (m, K) x (K, n); N is one weight's for pairs. ``m`` may
    be symbolic: its hint counts. Clusters work together, and split tiles count once for each part
    of K."""
    columns = n * (2 if program.paired else 1)
    high, wide = math.ceil(hint(m) / config.tile_m), math.ceil(columns / config.tile_n)
    clusters = math.ceil(high / config.cluster_m) * math.ceil(wide / config.cluster_n)
    clusters *= config.split_k
    at_once = max(1, gpu.processors // (config.cluster_m * config.cluster_n))
    waves = math.ceil(clusters / at_once)
    last = (clusters - (waves - 1) * at_once) / at_once
    return Division(high * wide, waves, last, mainloop_stages(program, config, gpu.arch))
