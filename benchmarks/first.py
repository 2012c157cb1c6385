# SPDX-License-Identifier: Apache-2.0
"""Seconds of the first training step under torch.compile and under coda: with nothing in any cache,
and again in a new process with what the first one left there (`again`).

``python -m benchmarks first OUT.json`` starts a process for each case and backend, one at a time.
It builds the model, and counts from the call of ``torch.compile`` to the end of the backward pass.
"""

import argparse
import collections
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from . import environment, measure, worth_models

STOCK = {"llama1b": ("1B", 16), "8b": ("8B",), "qwen3": ("qwen3_8b",), "qwen2": ("qwen2",)}
CASES = {
    **{name: functools.partial(worth_models.stock, *how) for name, how in STOCK.items()},
    **{name: worth_models.WORKLOADS[name] for name in ("LoRA", "window", "packed")},
}


def main(arguments: list[str]) -> None:
    """Measure all; or, as one of the processes, one."""
    parser = measure.parser("first", __doc__)
    add, both = parser.add_argument, ("inductor", "coda")
    add("--case", dest="cases", action="append", choices=CASES, help="repeatable")
    add("--backend", dest="backends", action="append", choices=both, help="repeatable")
    add("--part", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    cases, backends = given.cases or list(CASES), given.backends or both
    if given.part:
        given.file.write_text(json.dumps(measured(cases[0], backends[0])))
        return
    told = environment.describe(sys.argv[1:], given.commit, "benchmarks.first")
    results: list[dict[str, Any]] = []
    for case in cases:
        found = {backend: cold(case, backend) for backend in backends}
        results += [{"case": case, "backend": name, **each} for name, each in found.items()]
        given.file.write_text(json.dumps({"environment": told, "results": results}, indent=1))
        seconds = {name: each.get("seconds") for name, each in found.items()}
        print(case, seconds, *(each["error"] for each in found.values() if "error" in each))
        if all(seconds.get(name) for name in both):
            most = 1.25 * seconds["inductor"] + 5
            print(f"at most 1.25 x + 5 = {most:.1f} s: {seconds['coda'] <= most}", flush=True)


def cold(case: str, backend: str) -> dict[str, Any]:
    """:func:`measured` in a process of its own with empty caches, and what a second one measures
    `again` with full ones; or why it failed."""
    with tempfile.TemporaryDirectory(prefix="coda_first_") as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "benchmarks", "first", str(out), "--part"]
        found: list[dict[str, Any]] = []
        for _ in range(2):
            done = subprocess.run(
                [*command, "--case", case, "--backend", backend], cwd=environment.REPOSITORY,
                env=os.environ | {name: f"{folder}/{name}" for name in environment.CACHES},
                stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            if not out.exists():
                return {"error": environment.scrub(done.stderr[-600:])}
            found.append(json.loads(out.read_text()))
            out.unlink()
        return found[0] | {"again": found[1]}


def measured(case: str, backend: str) -> dict[str, Any]:
    """Seconds of the first step, its forward pass and the second step; of coda's, when kernels were
    on disk and how many GEMMs run how."""
    workload = CASES[case]()
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    wall, times = time.time(), [time.perf_counter()]
    function = torch.compile(workload.model, backend=backend)
    for _ in range(2):
        out = function(**workload.batch)
        wait()
        times.append(time.perf_counter())
        out.loss.backward()
        wait()
        times.append(time.perf_counter())
    first, forward, second = times[2] - times[0], times[1] - times[0], times[4] - times[2]
    found: dict[str, Any] = {"seconds": first, "forward": forward, "second_step": second}
    if backend == "coda":
        import coda_inductor

        kernels = Path(os.environ["CODA_CACHE_DIR"]).rglob("*.o")
        found["kernels"] = sorted(round(file.stat().st_mtime - wall, 1) for file in kernels)
        sites = (site.how for report in coda_inductor.reports() for site in report.sites)
        found["how"] = dict(collections.Counter(sites))
    return found
