# SPDX-License-Identifier: Apache-2.0
"""Sites without pauses: what kernels take where the GPU's power is the limit.

    python benchmarks/sustained.py OUT.json [--size 8B] [--rows 8192] [--seconds 0.4]

The tuner reads memory between two calls, so that the L2 cache is cold and the host ahead; the GPU
rests meanwhile, and its clock is high. A training step has no such pauses: it draws what the board
may, and takes its joules over that power (docs/gotchas.md). For each site of a layer, forward and
training, that was measured with pauses: its best configs, the unfused program and cuBLAS's products
alone, each repeated by itself with several sets of tensors in turn, once in this order and once
backwards. Joules, watts, the clock, and microseconds, which are joules over watts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import energy, environment, layer
from benchmarks.sites import layers
from coda_inductor.select.device import gpu_of
from coda_inductor.select.figures import Figures
from coda_inductor.select.site import Site
from coda_inductor.select.store import store_of
from coda_inductor.tune import inputs
from coda_inductor.tune.worker import _compiled, _kernel, _product, _products

#: Configs of a site, the fastest with pauses first; sets of its tensors, more than L2 holds.
CONFIGS, SETS = 3, 3
PARTS = ("joules", "watts", "mhz")
Call = Callable[[], object]


def sustained(
    calls: Mapping[str, Call], seconds: float, counter: energy.Counter
) -> dict[str, dict[str, float]]:
    """``{name: {"us", "joules", "watts", "mhz"}}`` of each call repeated alone, in this order and
    backwards: the mean of both. Raises EnergyError, see :func:`benchmarks.energy.joules`."""
    found: dict[str, list[dict]] = {name: [] for name in calls}
    for name in (*calls, *reversed(calls)):
        found[name].append(energy.joules(calls[name], seconds, counter))
    means = {
        name: {part: statistics.mean(each[part] for each in both) for part in PARTS}
        for name, both in found.items()
    }
    return {name: {"us": 1e6 * m["joules"] / m["watts"], **m} for name, m in means.items()}


def in_turn(calls: Sequence[Call]) -> Call:
    """Calls one of them, each time the next."""
    turn = itertools.cycle(calls)

    def call() -> object:
        return next(turn)()

    return call


def _calls(site: Site, known: Figures) -> dict[str, Call]:
    """The fastest kernels of ``site`` and what they compete with, each with SETS of tensors."""
    sets = [inputs.tensors(site, "cuda") for _ in range(SETS)]
    unfused = _compiled(site.program)

    def products(as_: list[torch.Tensor], bs: list[torch.Tensor]) -> Call:
        return lambda: [_product(site, a, b) for a, b in _products(site, as_, bs)]

    calls = {
        "plain": in_turn([products(as_, bs) for as_, bs, _ in sets]),
        "unfused": in_turn([lambda given=given: unfused(*given) for given in sets]),
    }
    for config in sorted(known.us, key=known.us.__getitem__)[:CONFIGS]:
        calls[config] = in_turn([_kernel(site.program, config, given) for given in sets])
    return calls


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=layer.SIZES, default="8B")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.4, help="each candidate, twice")
    parser.add_argument("--commit", default="", help="measured commit, where there is no .git")
    options = parser.parse_args(arguments)
    counter, store = energy.Counter(), store_of(gpu_of(torch.device("cuda", 0)))
    about = environment.describe([str(a) for a in arguments or sys.argv[1:]], options.commit)
    whole: dict[str, Any] = {"environment": about, "sites": {}}
    table = []
    for site in layers([layer.SIZES[options.size]], [options.rows], torch.bfloat16):
        if (known := store.find(site)) is None:
            continue
        figures = known[0]
        rested = {"plain": figures.plain, "unfused": figures.unfused, **figures.us}
        found = sustained(_calls(site, figures), options.seconds, counter)
        name = f"{site.name or figures.name} {site.m}x{site.n}x{site.k}"
        whole["sites"][f"{name} {site.program.key}"] = {
            each: {**of, "rested_us": rested[each]} for each, of in found.items()
        }
        options.out.write_text(json.dumps(whole) + "\n")
        for each, of in found.items():
            table.append([name, each, rested[each], of["us"], of["watts"], of["mhz"]])
            name = ""
        torch.cuda.empty_cache()
    heads = ["site", "", "us, rested", "us", "W", "MHz"]
    print(tabulate(table, heads, floatfmt=("", "", ".1f", ".1f", ".0f", ".0f")))


if __name__ == "__main__":
    main()
