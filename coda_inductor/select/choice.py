# SPDX-License-Identifier: Apache-2.0
"""How does a site run, and is a kernel expected to win? The launch reads this choice too.

Measurements of the site on this GPU model decide (``store``). Without them the site takes the
config of the nearest measured site with a similar program, or a default (``candidates``), and the
roofline decides whether it wins, with a margin (``roofline``). The alternative is what Inductor
would run, cuBLAS and elementwise kernels: a fused site must never be slower.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from coda_inductor.gpu import H100, Gpu
from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.report import Choice
from coda_inductor.select import roofline
from coda_inductor.select.config import Config, configs_in, legal_configs
from coda_inductor.select.figures import Figures
from coda_inductor.select.measurements import Measurements, measurements_of
from coda_inductor.select.site import Site

#: How many configs of a site are compiled and timed.
MANY = 16
#: Safety factor for launch times: processors differ, and a training step's host time varies by a
#: quarter from one step to the next.
_HOST = 1.25


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
        why = unmeasured(gpu) if fused is None else loses(site, fused, unfused)
    return Choice("kernel" if why is None else "unfused", config, why, fused, unfused, ground)


def _from_figures(site: Site, figures: Figures, origin: str, gpu: Gpu, *, gated: bool) -> Choice:
    order = [str(config) for config in legal_configs(site.program, site.arch, site.terms)]
    unfused = figures.plain + roofline.around_us(site, gpu) if site.after else figures.unfused
    config = figures.best(order)
    if config is None:
        first = next(iter(figures.failed.values()), "none was tried")
        why = refuse("no-working-config", f"no kernel of it works on {gpu.short}: {first}")
        return Choice("unfused", refusal=why, unfused_us=unfused, ground=origin)
    us, least = figures.us[config], figures.tolerance
    slower = loses(site, us, unfused, "measured-slower", least) if gated else None
    return Choice("kernel" if slower is None else "unfused", config, slower, us, unfused, origin)


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


def host_bound(
    gemms: Sequence[tuple[int, int, int]], gpu: Gpu = H100, *, training: bool = False
) -> Refusal | None:
    """The reason if all GEMMs of a graph, each (M, N, K), are left to cuBLAS, or None. The GPU
    would wait for the host, and our launches take the host longer than cuBLAS's. CUDA graphs remove
    this limit: the host then launches no kernels."""
    us = sum(roofline.product_us(m, n, k, gpu) for m, n, k in gemms)
    call_us = gpu.host_trained_us if training else gpu.host_gemm_us
    host = _HOST * ((gpu.host_step_us if training else gpu.host_call_us) + len(gemms) * call_us)
    if us >= host:
        return None
    text = (
        f"too small: the graph's GEMMs take {us:.0f} us, launching them up to {host:.0f} us, so "
        "the host is the limit (options['gate'] = 'always' fuses anyway)"
    )
    return refuse("too-small", text)


def unmeasured(gpu: Gpu) -> Refusal | None:
    """Why GEMMs without measurements are left to cuBLAS on ``gpu`` (no kernel may win), or None."""
    if gpu.rated:
        return None
    text = (
        f"there are no measurements on {gpu.short} (compute capability {gpu.capability[0]}.x), so "
        "no kernel is expected to win (python -m coda_inductor tune measures, options['gate'] = "
        "'always' fuses anyway)"
    )
    return refuse("gpu-not-measured", text)


def loses(
    site: Site, fused: float, unfused: float,
    code: str = "expected-slower", least: float = roofline.MARGIN - 1,
) -> Refusal | None:  # fmt: skip
    """The reason if ``site`` should not be fused, or None. The microseconds are expected or
    measured, as ``code`` says, and a kernel must be faster by ``least`` of its time."""
    if site.after and _only_statistics(site.program):
        text = "its product is stored anyway for an elementwise kernel: statistics save nothing"
        return refuse("statistics-only", text)
    if fused * (1 + least) <= unfused:
        return None
    text = f"{code.partition('-')[0]} {fused:.0f} us fused, {unfused:.0f} us unfused"
    short = f": faster by less than {100 * least:.1f} %" if fused < unfused else ""
    return refuse(code, text + short)


def _only_statistics(program: EpilogueProgram) -> bool:
    """Are the products stored unchanged, and only summed over N? This happens with a norm between a
    GEMM and a residual (Gemma 2): the norm's kernel must read the product in any case."""
    unchanged = all(store.value in program.accs for store in program.stores)
    sums = all(reduce.axis == "row" and reduce.combine == "add" for reduce in program.reduces)
    return unchanged and sums
