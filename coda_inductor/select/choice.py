# SPDX-License-Identifier: Apache-2.0
"""How does a site run? The gate and the launch both read this choice.

Measurements of the site on this GPU model decide (``store``). Without them the site takes the
config of the nearest measured site with a similar program, or a default (``candidates``), and the
roofline decides whether it wins, with a margin (``roofline``, ``gate``).
"""

import math
from dataclasses import replace

from coda_inductor.gpu import H100, Gpu
from coda_inductor.refusal import refuse
from coda_inductor.report import Choice
from coda_inductor.select import gate, roofline
from coda_inductor.select.config import Config, configs_in, legal_configs
from coda_inductor.select.figures import Figures
from coda_inductor.select.measurements import Measurements, measurements_of
from coda_inductor.select.site import Site

#: How many configs of a site are compiled and timed.
MANY = 16


def select(site: Site, *, gated: bool, store: Measurements | None = None) -> Choice:
    """Choose how ``site`` runs on its device; deterministic, without measuring. With ``gated`` a
    kernel must be faster than the unfused ops; otherwise any legal one runs. ``store``:
    measurements (None: an H100's)."""
    store = measurements_of(H100) if store is None else store
    choice = _select(site, store, gated=gated)
    if not (site.crowded and choice.config) or "counter" not in site.arch.features:
        return choice
    dynamic = Config.parse(choice.config).dynamic_twin()
    if not site.reading.suits(site.program, dynamic):
        return choice
    twin = str(dynamic)
    entry = store.find(site)
    wrong = entry is not None and twin in entry[0].failed
    return choice if wrong else replace(choice, config=twin)


def _select(site: Site, store: Measurements, *, gated: bool) -> Choice:
    gpu = store.gpu
    ground = "roofline" if gpu.rated else "unknown"
    if (why := site.refusal) is not None:
        plain = roofline.products_us(site, gpu)
        return Choice("unfused", refusal=why, unfused_us=plain, ground=ground)
    entry = store.find(site)
    if entry is not None:
        return _from_figures(site, *entry, gpu, gated=gated)
    config = str(candidates(site, gpu, store.nearest(site))[0])
    unfused = roofline.products_us(site, gpu) + roofline.around_us(site, gpu)
    fused = roofline.fused_us(site, gpu) if gpu.rated else None
    why = None
    if gated:
        why = gate.unmeasured(gpu) if fused is None else gate.loses(site, fused, unfused)
    return Choice("kernel" if why is None else "unfused", config, why, fused, unfused, ground)


def _from_figures(site: Site, figures: Figures, origin: str, gpu: Gpu, *, gated: bool) -> Choice:
    """The choice that follows from measurements."""
    order = [str(config) for config in legal_configs(site.program, site.arch, site.terms)]
    unfused = figures.plain + roofline.around_us(site, gpu) if site.after else figures.unfused
    config = figures.best(order)
    if config is None:
        first = next(iter(figures.failed.values()), "none was tried")
        why = refuse("no-working-config", f"no kernel of it works on {gpu.short}: {first}")
        return Choice("unfused", refusal=why, unfused_us=unfused, ground=origin)
    us, least = figures.us[config], figures.tolerance
    loses = gate.loses(site, us, unfused, "measured-slower", least) if gated else None
    return Choice("kernel" if loses is None else "unfused", config, loses, us, unfused, origin)


def candidates(site: Site, gpu: Gpu, near: tuple[Site, Figures] | None = None) -> list[Config]:
    """All legal configs of ``site``: first those measured at the nearest site (``near``), the
    fastest first; then a default; then the others, by the number of idle processors. A time that
    was measured at another size counts in proportion to what the busiest processor computes here
    and there. Of 329 shipped sites of an H200, each chosen by its nearest one among the configs
    measured at both, the choices then take 0.5 % longer than the best, and 0.75 % without the
    proportion; of 27 of an H100, 0.6 % and 0.5 % (2026-11)."""
    legal = legal_configs(site.program, site.arch, site.terms)
    measured: list[Config] = []
    if near is not None:
        there, figures = near
        known = [c for c in legal if str(c) in figures.us]
        ratios = {c: _waste(site, c, gpu) / _waste(there, c, gpu) for c in known}
        us = {str(c): figures.us[str(c)] * ratio for c, ratio in ratios.items()}
        best = replace(figures, us=us).best(us)  # of equal ones the first
        measured = sorted(known, key=lambda c: (str(c) != best, us[str(c)]))
    ranked = sorted(legal, key=lambda c: _waste(site, c, gpu))
    common = site.reading.kind(site.program) == "common"
    default = [c for c in ranked if common and c in configs_in(site.arch.defaults)][:1]
    return list(dict.fromkeys((*measured, *(default or legal[:1]), *ranked)))


def _waste(site: Site, config: Config, gpu: Gpu) -> float:
    """Accumulator elements that the busiest processor computes, plus the cost of loading a tile's
    operands: the larger a tile, the more multiplications for each element of A and B."""
    columns = site.n * len(site.program.accs)
    tiles = math.ceil(site.m / config.tile_m) * math.ceil(columns / config.tile_n)
    area = config.tile_m * config.tile_n
    loads = 1 + 64 * (1 / config.tile_m + 1 / config.tile_n)
    return math.ceil(tiles / gpu.processors) * area * loads
