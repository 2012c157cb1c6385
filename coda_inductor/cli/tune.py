# SPDX-License-Identifier: Apache-2.0
"""Measure on this GPU what a model needs, before it is compiled; --report shows what was measured.

The model is a Hugging Face family (--hf llama), or FILE.py:FUNCTION or MODULE:FUNCTION, where the
function returns (model, args) or (model, args, kwargs). It is traced as explain traces it: nothing
of it is run, --hf models hold no memory, and one layer is enough (--set num_hidden_layers=1). What
is found is kept in the cache folder and holds for every model with such layers.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tabulate import tabulate

from coda_inductor.cache_dir import cache_dir
from coda_inductor.cli import models
from coda_inductor.errors import CodaError, ExplainError
from coda_inductor.select import store
from coda_inductor.select.device import gpu_of
from coda_inductor.select.figures import Figures
from coda_inductor.select.store import Store, store_of

HELP = "measure on this GPU what a model needs; show what won by how much"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    models.arguments(parser)
    parser.add_argument("--tokens", metavar="N[,N...]",
                        help="tokens a sequence, by default 2048 (--hf); several are measured in "
                        "turn")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=600.0, help="at most, for each graph")
    parser.add_argument("--report", action="store_true", help="what is measured, as a table")
    parser.add_argument("--plot", metavar="FILE", help="the same as a plot (.svg, .png)")


def run(chosen: argparse.Namespace) -> int:
    """Measure, report, plot. Returns 1, with a message, if that is not possible."""
    try:
        if chosen.target or chosen.hf:
            if not torch.cuda.is_available():
                raise ExplainError("tune measures on a GPU, and torch sees none")
            _tune(chosen)
        elif not (chosen.report or chosen.plot):
            raise ExplainError("give a model to measure, or --report")
        kept = stores()
        if chosen.report or not chosen.plot:
            sys.stdout.write(report(kept))
        if chosen.plot:
            plot(kept, Path(chosen.plot))
            sys.stdout.write(f"wrote {chosen.plot}\n")
    except CodaError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def stores() -> dict[str, dict[str, Figures]]:
    """This user's measurements: the file's name -> its sites."""
    folder = cache_dir() / store.FOLDER
    return {path.stem: store.sites_in(path) for path in sorted(folder.glob("*.json"))}


def report(kept: dict[str, dict[str, Figures]]) -> str:
    """The measurements as tables, a line a site: what won, and by how much."""
    if not kept:
        return f"nothing was measured yet (it would be in {cache_dir() / store.FOLDER})\n"
    parts = []
    heads = ("site", "M x N x K", "best kernel", "us", "unfused us", "gain", "+-")
    for name, sites in kept.items():
        rows = [_row(key, found) for key, found in sorted(sites.items(), key=_by_name)]
        parts.append(f"{name}: {len(rows)} sites\n\n{tabulate(rows, heads)}\n")
    return "\n".join(parts)


def plot(kept: dict[str, dict[str, Figures]], path: Path) -> None:
    """Each site's unfused time over its best kernel's, as bars; one panel a file.

    Raises:
        ExplainError: there is nothing to plot, no matplotlib, or no such file can be written.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise ExplainError("--plot needs matplotlib: pip install matplotlib") from None
    panels = {name: [_bar(*site) for site in sorted(sites.items(), key=_by_name) if site[1].us]
              for name, sites in kept.items()}  # fmt: skip
    panels = {name: bars for name, bars in panels.items() if bars}
    if not panels:
        raise ExplainError("nothing was measured yet: there is nothing to plot")
    heights = [1 + 0.22 * len(bars) for bars in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, (name, bars) in zip(axes[:, 0], panels.items(), strict=True):
        labels, gains, errors = zip(*reversed(bars), strict=True)
        colours = ["#2a78b5" if gain >= 1 else "#c9793b" for gain in gains]
        axis.barh(range(len(gains)), [gain - 1 for gain in gains], xerr=errors, left=1,
                  color=colours, error_kw={"lw": 0.8})  # fmt: skip
        axis.set_yticks(range(len(gains)), labels, fontsize=7)
        axis.axvline(1, color="black", lw=0.8)
        axis.set_ylim(-0.6, len(gains) - 0.4)
        axis.set_xlabel("time of cuBLAS and Inductor's kernels over that of the best fused kernel")
        axis.set_title(name, fontsize=9)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ExplainError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)


def _tune(chosen: argparse.Namespace) -> None:
    from coda_inductor.explanation.capture import capture
    from coda_inductor.options import parse

    given = {"tune": "always", "tune_seconds": chosen.seconds}
    given |= dict(models.setting(text, "--option") for text in chosen.option)
    options = replace(parse(None, given), strict=False)
    device = torch.device("cuda", torch.cuda.current_device())
    known = store_of(gpu_of(device))
    for tokens in _lengths("2048" if chosen.tokens is None else chosen.tokens):
        model, args, kwargs = models.model_of(chosen, tokens)
        before = set(known.own())
        with torch.set_grad_enabled(chosen.train):
            capture(model, args, kwargs, options, as_if=device)
        _said(known, before, f"{tokens} tokens" if chosen.hf else chosen.target)


def _said(known: Store, before: set[str], what: str) -> None:
    new = len(set(known.own()) - before)
    if new:
        store.advance()
    sys.stdout.write(f"{what}: {new} sites measured, kept in {known.path}\n")


def _lengths(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ExplainError(f"--tokens {text!r}: write one or more positive numbers, as 512,2048")
    return found


def _by_name(site: tuple[str, Figures]) -> tuple[str, int, str]:
    return site[1].name, site[1].m, site[0]


def _row(key: str, found: Figures) -> tuple[object, ...]:
    config = found.best(found.us)
    best = (config, f"{found.us[config]:.1f}") if config else ("none works", "")
    gain = f"{found.unfused / found.us[config]:.3f}" if config else ""
    sure = f"{100 * found.tolerance:.1f} %"
    return found.name, _size(key, found), *best, f"{found.unfused:.1f}", gain, sure


def _bar(key: str, found: Figures) -> tuple[str, float, float]:
    gain = found.unfused / min(found.us.values())
    return f"{found.name} {_size(key, found)}", gain, gain * found.tolerance


def _size(key: str, found: Figures) -> str:
    """``8192x2048x2048``: the rows that were measured, and what the key says of N and K."""
    return f"{found.m}x{key.partition(' ')[2].partition(' ')[0].partition('x')[2]}"
