# SPDX-License-Identifier: Apache-2.0
"""One question, one answer: how does a site run? The gate and the launch both read the choice.

The candidates are every legal config and the unfused way. What was measured of the very site on
this GPU model speaks first (``store``), then the model (``model``), with a margin. The parts are
kept apart: *legal* (``legality``), *which config* and *does it win* (``figures`` or ``gate``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from coda_inductor.errors import KernelError
from coda_inductor.graph.sizes import hint
from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.select import gate
from coda_inductor.select.config import Config, legal_configs
from coda_inductor.select.device import H100, Gpu, arch_of
from coda_inductor.select.figures import Figures
from coda_inductor.select.legality import unsupported
from coda_inductor.select.model import ground, kernel_us, product_us
from coda_inductor.select.site import Site
from coda_inductor.select.store import Store


@dataclass(frozen=True)
class Choice:
    """How a site runs.

    Attributes:
        how: ``"kernel"``, ``"reference"`` (plain ops for Inductor) or ``"unfused"``.
        config: of the kernel, e.g. ``128x192:2x1:pp``; also where one is possible but would lose.
        refusal: why it is no kernel.
        fused_us: expected microseconds of the kernel; None where the model knows none.
        unfused_us: the same of cuBLAS and Inductor's elementwise kernels.
        ground: what these times rest on: "here" (measured by this user), "shipped" (measured), or
            what ``model.ground`` says.
    """

    how: str
    config: str = ""
    refusal: Refusal | None = None
    fused_us: float | None = None
    unfused_us: float = 0.0
    ground: str = "modelled"

    @property
    def measured(self) -> bool:
        """Was the very site measured?"""
        return self.ground in ("here", "shipped")


def select(
    site: Site, *, gated: bool, store: Store | None = None, optimistic: bool = False
) -> Choice:
    """How ``site`` runs on its device; deterministic, nothing is measured here. ``gated`` asks for
    what is faster than the unfused way, else whatever is legal becomes a kernel. ``store`` says
    what was measured (None: on no GPU, and an H100 is meant). ``optimistic``: on a GPU that nothing
    is known of, kernels win until they are measured."""
    gpu = H100 if store is None else store.gpu
    choice = _selected(site, gpu, store, gated=gated, optimistic=optimistic)
    if not (site.crowded and choice.config) or gpu.arch != 9:
        return choice
    twin = str(Config.parse(choice.config).dynamic_twin())
    found = None if store is None else store.find(site)
    wrong = found is not None and twin in found[0].failed
    return choice if wrong else replace(choice, config=twin)


def _selected(
    site: Site, gpu: Gpu, store: Store | None, *, gated: bool, optimistic: bool
) -> Choice:
    program, m, n, k = site.program, site.m, site.n, site.k
    plain = len(program.accs) * sum(product_us(program, m, n, each, gpu) for each in site.ks)
    majors = site.a_major, site.b_major
    why = unsupported(program, n, k, *majors, device=site.device, terms=len(site.ks))
    if why is not None:
        plain_ground = ground(None, None, m, n, site.ks[0], gpu=gpu)
        return Choice("unfused", refusal=why, unfused_us=plain, ground=plain_ground)
    found = None if store is None else store.find(site)
    if found is not None:
        return _measured(site, *found, gpu, gated=gated)
    config = choose(program, m, n, k, site.device, site.terms, gpu)
    fused, unfused = gate.expected(site, config, gpu)
    rests_on = ground(program, config, m, n, k, site.terms, gpu, site.a_major)
    known = math.isfinite(fused)
    why = None
    if gated and (known or not optimistic):
        why = gate.loses(site, fused, unfused, rests_on) if known else gate.unmeasured(gpu)
    how = "kernel" if why is None else "unfused"
    return Choice(how, str(config), why, fused if known else None, unfused, rests_on)


def _measured(site: Site, found: Figures, where: str, gpu: Gpu, *, gated: bool) -> Choice:
    """The choice that measurements leave."""
    order = [str(config) for config in legal_configs(site.program, gpu.arch, site.terms)]
    unfused = found.plain + gate.around_us(site, gpu) if site.after else found.unfused
    config = found.best(order)
    if config is None:
        first = next(iter(found.failed.values()), "none was tried")
        why = refuse("no-working-config", f"no kernel of it works on {gpu.short}: {first}")
        return Choice("unfused", refusal=why, unfused_us=unfused, ground=where)
    us = found.us[config]
    loses = gate.loses(site, us, math.inf)  # whatever it takes
    if loses is None and not found.wins(us, unfused):
        text = f"measured {us:.0f} us fused, {unfused:.0f} us unfused"
        loses = refuse("measured-slower", text)
    if loses is not None and gated:
        return Choice("unfused", config, loses, us, unfused, where)
    return Choice("kernel", config, None, us, unfused, where)


def choose(
    program: EpilogueProgram, m, n: int, k: int, device=None, terms: int = 1, gpu: Gpu = H100
) -> Config:
    """The config to run ``program`` with on (m, k) x (k, n); deterministic, never measures.

    ``m`` may be a SymInt: its hint counts. ``device`` is the tensors' device (None: the current
    CUDA device, or Hopper where there is none). ``terms``: how many products the accumulator is
    the sum of; ``k`` is the sum of all their K's.

    Raises:
        KernelError: if no config is legal; ``legality.unsupported`` says so beforehand.
    """
    arch = arch_of(device)
    configs = legal_configs(program, arch, terms)
    if not configs:
        raise KernelError("the program needs more shared memory than any kernel config leaves")
    if len(configs) == 1 or arch != gpu.arch:  # of another generation the model knows nothing
        return configs[0]
    rows = hint(m)
    return min(configs, key=lambda c: kernel_us(program, c, rows, n, k, terms, gpu))
