# SPDX-License-Identifier: Apache-2.0
"""Sites without pauses: what kernels take where the GPU's power is the limit.

    python -m benchmarks.sustained OUT.json [--size 8B] [--rows 8192] [--seconds 0.4]

A training step of large products has no pauses: it draws what the board may, the clock is kept
down, and what kernels take is their joules over that power (docs/gotchas.md, "Power"). For each
site of a layer, forward and training, that was measured: its best configs, the unfused program and
cuBLAS's products alone, each repeated by itself with several sets of tensors in turn, once in this
order and once backwards. Joules, watts, the clock, what kept it down, and microseconds, which are
joules over watts; beside them what the table says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from coda_inductor.runtime import pool
from coda_inductor.runtime.launch import requests
from coda_inductor.select.device import gpu_of
from coda_inductor.select.figures import Figures
from coda_inductor.select.site import Site
from coda_inductor.select.store import store_of
from coda_inductor.tune import inputs, load
from coda_inductor.tune.worker import _call, _compiled

from . import energy, environment, layer
from .sites import layers

#: Sets of a site's tensors, more than L2 holds.
SETS = 3
PARTS = ("joules", "watts", "mhz")


def sustained(
    calls: Mapping[str, load.Call], seconds: float, counter: energy.Counter
) -> dict[str, dict[str, Any]]:
    """``{name: {"us", "joules", "watts", "mhz", "limits"}}`` of each call repeated alone, in this
    order and backwards: the mean of both (limits: of the second). Raises EnergyError, see
    :func:`benchmarks.energy.joules`."""
    found: dict[str, list[dict]] = {name: [] for name in calls}
    for name in (*calls, *reversed(calls)):
        found[name].append(energy.joules(calls[name], seconds, counter))
    means = {
        name: {part: statistics.mean(each[part] for each in both) for part in PARTS}
        | {"limits": both[-1]["limits"]}
        for name, both in found.items()
    }
    return {name: {"us": 1e6 * m["joules"] / m["watts"], **m} for name, m in means.items()}


def _fastest(figures: Figures, count: int) -> list[str]:
    """Its configs, the fastest first, by the table."""
    return sorted(figures.us, key=figures.us.__getitem__)[:count]


def _compile(sites: Sequence[tuple[Site, list[str]]]) -> None:
    """Compile their kernels side by side, in the pool's processes."""
    given = ((site, config, inputs.tensors(site, "meta")) for site, cs in sites for config in cs)
    pool.submit(
        [
            request
            for site, config, (as_, bs, _) in given
            for request in requests(as_, bs, site.program.to_json(), config)
        ]
    )


def _calls(site: Site, configs: Sequence[str]) -> dict[str, load.Call]:
    """Kernels of ``site`` and what they compete with, each with SETS of tensors."""
    sets = [inputs.tensors(site, "cuda") for _ in range(SETS)]
    unfused = _compiled(site.program)
    return {
        name: load.in_turn([_call(site, name, given, unfused) for given in sets])
        for name in ("plain", "unfused", *configs)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=layer.SIZES, default="8B")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--configs", type=int, default=3, help="of a site")
    parser.add_argument("--seconds", type=float, default=0.4, help="each candidate, twice")
    parser.add_argument("--commit", default="", help="measured commit, where there is no .git")
    options = parser.parse_args(arguments)
    counter, store = energy.Counter(), store_of(gpu_of(torch.device("cuda", 0)))
    given = sys.argv[1:] if arguments is None else arguments
    about = environment.describe(given, options.commit or None, "benchmarks.sustained")
    whole: dict[str, Any] = {"environment": about, "sites": {}}
    table = []
    known = [
        (site, found[0])
        for site in layers([layer.SIZES[options.size]], [options.rows], torch.bfloat16)
        if (found := store.find(site)) is not None
    ]
    _compile([(site, _fastest(figures, options.configs)) for site, figures in known])
    for site, figures in known:
        table_us = {"plain": figures.plain, "unfused": figures.unfused, **figures.us}
        calls = _calls(site, _fastest(figures, options.configs))
        found = sustained(calls, options.seconds, counter)
        name = f"{site.name or figures.name} {site.m}x{site.n}x{site.k}"
        whole["sites"][f"{name} {site.program.key}"] = {
            each: {**of, "table_us": table_us[each]} for each, of in found.items()
        }
        options.out.write_text(json.dumps(whole) + "\n")
        for each, of in found.items():
            table.append([name, each, table_us[each], of["us"], of["watts"], of["mhz"]])
            name = ""
        torch.cuda.empty_cache()
    heads = ["site", "", "us, by the table", "us", "W", "MHz"]
    print(tabulate(table, heads, floatfmt=("", "", ".1f", ".1f", ".0f", ".0f")))


if __name__ == "__main__":
    main()
