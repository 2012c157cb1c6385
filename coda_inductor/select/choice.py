# SPDX-License-Identifier: Apache-2.0
"""One question, one answer: how does a site run? The gate and the launch both read the choice.

The three parts of it are kept apart: *legal* (``legality``), *which config* (``config`` by
``model``) and *expected to win* (``gate``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coda_inductor.errors import KernelError
from coda_inductor.graph.sizes import hint
from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal
from coda_inductor.select import gate
from coda_inductor.select.config import Config, legal_configs
from coda_inductor.select.device import arch_of
from coda_inductor.select.legality import unsupported
from coda_inductor.select.model import UNSURE, cublas_us, ground, kernel_us
from coda_inductor.select.site import Site


@dataclass(frozen=True)
class Choice:
    """How a site runs.

    Attributes:
        how: ``"kernel"``, ``"reference"`` (plain ops for Inductor) or ``"unfused"``.
        config: of the kernel, e.g. ``128x192:2x1:pp``; also where one is possible but would lose.
        refusal: why it is no kernel.
        fused_us: expected microseconds of the kernel; None where the model knows none.
        unfused_us: the same of cuBLAS and Inductor's elementwise kernels.
        ground: what these times rest on, see ``model.ground``.
    """

    how: str
    config: str = ""
    refusal: Refusal | None = None
    fused_us: float | None = None
    unfused_us: float = 0.0
    ground: str = "modelled"


def select(site: Site, *, gated: bool) -> Choice:
    """How ``site`` runs on its device; deterministic, nothing is measured here. ``gated`` asks for
    what is expected to win, else whatever is legal becomes a kernel."""
    program, m, n, k = site.program, site.m, site.n, site.k
    plain = len(program.accs) * sum(cublas_us(m, n, each) for each in site.ks)
    why = unsupported(program, n, k, b_major=site.b_major, device=site.device)
    if why is not None:
        plain_ground = ground(None, None, m, n, site.ks[0])
        return Choice("unfused", refusal=why, unfused_us=plain, ground=plain_ground)
    config = choose(program, m, n, k, site.device, site.terms)
    fused, unfused = gate.expected(site, config)
    why = gate.loses(site, fused, unfused) if gated else None
    rests_on = ground(program, config, m, n, k, site.terms)
    if why is not None and why.code == "expected-slower" and rests_on in UNSURE:
        why = why.within(f"{{}} ({UNSURE[rests_on]})")
    us = fused if math.isfinite(fused) else None
    how = "kernel" if why is None else "unfused"
    return Choice(how, str(config), why, us, unfused, rests_on)


def choose(program: EpilogueProgram, m, n: int, k: int, device=None, terms: int = 1) -> Config:
    """The config to run ``program`` with on (m, k) x (k, n); deterministic, never measures.

    ``m`` may be a SymInt: its hint counts. ``device`` is the tensors' device (None: the current
    CUDA device, or Hopper where there is none). ``terms``: how many products the accumulator is
    the sum of; ``k`` is the sum of all their K's.

    Raises:
        KernelError: if no config is legal; ``legality.unsupported`` says so beforehand.
    """
    configs = legal_configs(program, arch_of(device))
    if not configs:
        raise KernelError("the program needs more shared memory than any kernel config leaves")
    if len(configs) == 1:
        return configs[0]
    rows = hint(m)
    return min(configs, key=lambda c: kernel_us(program, c, rows, n, k, terms))
