# SPDX-License-Identifier: Apache-2.0
"""Measure kernels of a model on this GPU, before the model is compiled.

One layer is enough (--set num_hidden_layers=1). The measurements are kept in
the cache folder and used for every model with such layers. Without a model,
the command measures what earlier compilations on this machine had no time to
measure. --report shows the measurements.
"""

import argparse
import sys
from dataclasses import replace

import torch
from tabulate import tabulate

from coda_inductor.cache_dir import cache_dir
from coda_inductor.cli import models
from coda_inductor.errors import ExplainError, OptionError
from coda_inductor.gpu import gpu_of
from coda_inductor.select import measurements
from coda_inductor.select.figures import Figures
from coda_inductor.select.measurements import Measurements, measurements_of
from coda_inductor.tune.tuner import Tuner

HELP = "measure on this GPU what a model needs; show the measurements"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    models.arguments(parser)
    parser.add_argument("--tokens", metavar="N[,N...]",
                        type=lambda text: [models.positive(part) for part in text.split(",")],
                        help="tokens a sequence, by default 2048 (--hf); several are measured in "
                        "turn")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=600.0, help="at most, for each graph")
    parser.add_argument("--report", action="store_true", help="what is measured, as a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure the sites and print the tables. Returns 0. Raises OptionError if there is no such
    model, or nothing to do, ExplainError without a GPU, or if the model cannot be traced."""
    if arguments.target or arguments.hf:
        _tune(arguments)
    elif not arguments.report:
        _tune_left(arguments.seconds)
    sys.stdout.write(report(stores()))
    return 0


def stores() -> dict[str, dict[str, Figures]]:
    """This user's measurements: the name of each file -> its sites and their figures."""
    folder = cache_dir() / measurements.FOLDER
    return {path.stem: measurements.sites_in(path) for path in sorted(folder.glob("*.json"))}


def report(tables: dict[str, dict[str, Figures]]) -> str:
    """The measurements as tables with one line per site: the fastest variant, and by how much."""
    if not tables:
        return f"no measurements yet (they would be in {cache_dir() / measurements.FOLDER})\n"
    parts = []
    heads = ("site", "M x N x K", "best kernel", "us", "unfused us", "gain", "+-")
    for name, sites in tables.items():
        order = sorted(sites.items(), key=lambda site: (site[1].name, site[1].m, site[0]))
        rows = [_row(key, figures) for key, figures in order]
        parts.append(f"{name}: {len(rows)} sites\n\n{tabulate(rows, heads)}\n")
    return "\n".join(parts)


def _tune_left(seconds: float) -> None:
    cache = measurements_of(gpu_of(device := _device()))
    if not (sites := cache.left()):
        raise OptionError("no sites are left to measure: name a model, or use --report")
    before, tuner = set(cache.user_rows()), Tuner(cache, device, seconds)
    tuner.measure(sites)
    tuner.close()
    _summary(cache, before, f"{len(sites)} that were left")


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise ExplainError("tune measures on a GPU, but torch sees none")
    return torch.device("cuda", torch.cuda.current_device())


def _tune(arguments: argparse.Namespace) -> None:
    from coda_inductor.explanation.capture import capture
    from coda_inductor.options import parse

    settings = {"tune": "always", "tune_seconds": arguments.seconds} | models.options_of(arguments)
    options = replace(parse(None, settings), strict=False)
    cache = measurements_of(gpu_of(device := _device()))
    for tokens in arguments.tokens or [None]:
        model, args, kwargs = models.model_of(arguments, tokens)
        before = set(cache.user_rows())
        with torch.set_grad_enabled(arguments.train):
            capture(model, args, kwargs, options, device=device)
        _summary(cache, before, f"{args[0].shape[1]} tokens" if arguments.hf else arguments.target)


def _summary(cache: Measurements, before: set[str], noun: str) -> None:
    new = len(set(cache.user_rows()) - before)
    if new:
        measurements.advance()
    sys.stdout.write(f"{noun}: {new} sites measured, kept in {cache.path}\n")


def _row(key: str, figures: Figures) -> tuple[object, ...]:
    config = figures.best(figures.us)
    best = (config, f"{figures.us[config]:.1f}") if config else ("none works", "")
    gain = f"{figures.unfused / figures.us[config]:.3f}" if config else ""
    sure = f"{100 * figures.tolerance:.1f} %"
    n_and_k = key.partition(" ")[2].partition(" ")[0].partition("x")[2]
    size = f"{figures.m}x{n_and_k}"
    return figures.name, size, *best, f"{figures.unfused:.1f}", gain, sure
