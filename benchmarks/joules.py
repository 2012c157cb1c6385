# SPDX-License-Identifier: Apache-2.0
"""Would a tuner that counts joules choose other kernels? ``python -m benchmarks joules OUT.json``.

Of the sites of a stock Llama's training step at 8192 tokens, the ten with the largest products are
tuned as ``tune`` does. Then each config that it tried runs back to back for 1.2
seconds: microseconds and joules of a call. Two stores keep what that says, one of time, the
other with joules in place of microseconds, and a step of the stock model is sustained with each,
A B B A. ``--render`` writes docs/results/joules.md.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate

from coda_inductor import pipeline, plan
from coda_inductor.cache_dir import write
from coda_inductor.explanation.capture import capture
from coda_inductor.options import parse
from coda_inductor.select.device import gpu_of
from coda_inductor.select.figures import Figures, key_of
from coda_inductor.select.site import Site
from coda_inductor.select.store import Store, as_text
from coda_inductor.tune.tuner import Tuner

from . import energy, environment, headline, measure, whole, worth, worth_models

#: Width -> the stock step of it.
STEPS = {"1B": "Llama 1B training", "8B": "Llama 8B, 4 layers, training"}
SITES, SECONDS = 10, 1.2
#: In place of microseconds: at so many watts a call of one microsecond takes as many microjoules.
WATTS = 700.0
PAGE = environment.REPOSITORY / "docs" / "results" / "joules.md"


def main(arguments: list[str]) -> None:
    """Measure, render; or, as one of the processes, be measured."""
    parser = headline.parser_of("joules", __doc__, "size", choices=STEPS)
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args(arguments)
    if options.part:
        answer(options.part)
        return
    if not options.render:
        found: dict[str, Any] = {
            "environment": environment.describe(sys.argv[1:], options.commit, "benchmarks.joules")
        }
        for size in options.names or STEPS:
            found[size] = {"sites": sites(size)}
            options.file.write_text(json.dumps(found, indent=1))
            found[size]["steps"] = steps(size, found[size]["sites"], options.file)
            options.file.write_text(json.dumps(found, indent=1))
        print(page(found))
    else:
        text = page(json.loads(options.file.read_text()))
        PAGE.write_text(whole.BLOCK.sub(lambda _: text, PAGE.read_text()))


def sites(size: str) -> dict[str, Any]:
    """Key -> name, figures of the tuner, and microseconds, joules and watts of each call."""
    from coda_inductor.tune import inputs, load, worker

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        tuned = _tuned(size, Path(folder))
    largest = sorted(tuned, key=lambda key: -tuned[key][1].plain)
    for key in largest[:SITES]:
        site, figures = tuned[key]
        unfused = worker._compiled(site.program)
        sets = [inputs.tensors(site, "cuda") for _ in range(load.sets(inputs.size(site)))]
        calls = {}
        for name in ("plain", "unfused", *figures.us):
            call = load.in_turn([worker._call(site, name, one, unfused) for one in sets])
            calls[name] = _repeated(call)
        found[key] = {"name": site.name, "tuner": vars(figures), "calls": calls}
        print(key, {name: round(call["us"]) for name, call in calls.items()}, flush=True)
        del sets
        torch.cuda.empty_cache()
    return found


def _tuned(size: str, folder: Path) -> dict[str, tuple[Site, Figures]]:
    """The sites of a step of one layer with its head, and what the tuner says of them."""
    device = torch.device("cuda", torch.cuda.current_device())
    store, asked = Store(replace(gpu_of(device), sites=None), folder), {}

    class Recorded(Tuner):
        def measure(self, sites: Sequence[Site]) -> bool:
            asked.update({key_of(site): site for site in sites})
            return super().measure(sites)

    workload = worth_models.stock(size, layers=1)
    options = parse(None, {"tune": "always", "tune_seconds": 110})
    with (
        mock.patch.object(plan, "store_of", return_value=store),
        mock.patch.object(pipeline, "Tuner", Recorded),
    ):
        capture(workload.model, (), workload.batch, options, as_if=device)
    own = store.own()
    return {key: (site, own[key]) for key, site in asked.items() if key in own and own[key].us}


def _repeated(call: measure.Call) -> dict[str, float]:
    counted = energy.joules(call, SECONDS, energy.Counter())
    joules, watts = counted["joules"], counted["watts"]
    return {"us": 1e6 * joules / watts, "joules": joules, "watts": watts}


def as_figures(row: Mapping[str, Any], by: str) -> Figures:
    """What a store keeps of a site, by "us" or by "joules"."""
    scale = 1e6 / WATTS if by == "joules" else 1.0
    us = {name: scale * call[by] for name, call in row["calls"].items()}
    kept = {"unfused": us.pop("unfused"), "plain": us.pop("plain")}
    return Figures(**(row["tuner"] | kept | {"us": us, "spread": 0.0}))


def steps(size: str, found: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """The samples of a step whose store was filled by "us", and of one by "joules"."""
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    running = {}
    before = os.environ.get("CODA_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        for by in ("us", "joules"):
            os.environ["CODA_CACHE_DIR"] = cache = f"{folder}/{by}"
            name = Store(gpu, Path(cache)).path.name
            Path(cache, "measured").mkdir(parents=True)
            rows = {key: as_figures(row, by) for key, row in found.items()}
            write(Path(cache, "measured", name), as_text(gpu, rows))
            command = ["joules", str(out), "--part", STEPS[size]]
            running[by] = headline.start(command, out.with_suffix(".log"))
        if before is None:
            del os.environ["CODA_CACHE_DIR"]
        else:
            os.environ["CODA_CACHE_DIR"] = before
        answers = headline.in_turn(running)
        for process in running.values():
            process.kill()
    return answers


def answer(case: str) -> None:
    """Compile, then answer each line of stdin with a line of JSON."""
    out, sys.stdout = sys.stdout, sys.stderr
    os.environ["CODA_TUNE"] = "never"
    step = headline.CASES[case]().step((), "coda")
    step()
    for number, _ in enumerate(sys.stdin):
        line: dict[str, Any] = worth.facts(step)
        if number:
            line = {"ms": worth.sustained(step, settle=0.7, sample=1.0)}
            line |= energy.joules(step, 2.0, energy.Counter())
        print(json.dumps(line), file=out, flush=True)


def page(found: Mapping[str, Any]) -> str:
    """What stands between the marks of docs/results/joules.md."""
    parts = []
    for size in (size for size in STEPS if size in found):
        rows = []
        for key, row in found[size]["sites"].items():
            best = {by: as_figures(row, by).best(row["tuner"]["us"]) for by in ("us", "joules")}
            calls, fast = row["calls"], row["calls"][best["us"]]
            less = calls[best["joules"]]["joules"] / fast["joules"]
            tuned = Figures(**row["tuner"]).best(row["tuner"]["us"])
            watts = [call["watts"] for name, call in calls.items() if name != "plain"]
            rows.append([
                row["name"] or key.split()[1], key.split()[1], tuned, best["us"], best["joules"],
                f"{less:.3f}", f"{calls[best['joules']]['us'] / fast['us']:.3f}",
                f"{min(watts):.0f} to {max(watts):.0f}",
            ])  # fmt: skip
        heads = ("site", "M x N x K", "tune takes", "least time", "least energy", "its joules",
                 "its time", "watts")  # fmt: skip
        parts.append(f"{size} widths:\n\n{tabulate(rows, heads, 'github', disable_numparse=True)}")
        if "steps" in found[size]:
            said = []
            for by, what in (("us", "time"), ("joules", "energy")):
                samples = found[size]["steps"][by]["samples"]
                ms, joules = (statistics.median(s[n] for s in samples) for n in ("ms", "joules"))
                said.append(f"{ms:.2f} ms and {joules:.2f} J by least {what}")
            parts.append(f"A step ({STEPS[size]}): {', '.join(said)}.")
    about = found["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    where = f"Measured on one {about['gpu']}: {versions}; commit {about['commit']}."
    return "\n\n".join([where, *parts]) + "\n"
