# SPDX-License-Identifier: Apache-2.0
"""The processes of suites `grid`, `families` and `fp8`: ``python -m benchmarks.grid_job FOLDER``
reads its order there.

An order is JSON: "ahead" has many processes compile the cases into the shared caches;
"measure" measures them one after another in this process, alone on the machine; "cold" takes the
time of one variant's first call.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from . import contest
from .cases import Case, Way
from .runner import Files


def main(folder: str) -> None:
    """Do what the order in `folder` says; see ``grid_run`` for what it holds."""
    order = json.loads(Files(Path(folder)).order.read_text())
    named = {name: Way(**way) for name, way in order["ways"].items()}
    if order["what"] == "ahead":
        _ahead(order, named)
    elif order["what"] == "cold":
        case, name = order["work"]
        took = contest.first_call(order["suite"], Case.parse(case), named[name])
        Files(Path(folder)).result.write_text(json.dumps(took))
    else:
        _measure(Path(folder), order, named)


def _ahead(order: dict, named: dict[str, Way]) -> None:
    """Compile every variant of every case, in `order["jobs"]` processes."""
    context = multiprocessing.get_context("spawn")  # an import may have touched the GPU
    queue = context.SimpleQueue()
    workers = [
        context.Process(target=_worker, args=(queue, order["suite"], Path(order["said"]), named))
        for _ in range(order["jobs"])
    ]
    for worker in workers:
        worker.start()
    for work in [*order["work"], *([None] * len(workers))]:
        queue.put(work)
    for worker in workers:
        worker.join()


def _worker(queue: Any, suite: str, folder: Path, named: dict[str, Way]) -> None:
    from torch._inductor import config

    # What a kernel's fastest config is cannot be told while others use the GPU.
    config.autotune_local_cache = False
    while (work := queue.get()) is not None:
        case, name = work
        start = time.monotonic()
        try:
            said = contest.prepare(suite, Case.parse(case), named[name])
        except Exception:  # noqa: BLE001  the measuring process will say what is wrong
            traceback.print_exc()
            said = None
        took = time.monotonic() - start
        print(f"ahead {case} {name}: {took:.1f} s", flush=True)
        if said:
            path = folder / f"{case.replace('/', '_')}-{name}.json"
            path.write_text(json.dumps([case, name, said]))


def _measure(folder: Path, order: dict, named: dict[str, Way]) -> None:
    """Measure the cases until the deadline; each result is a line of the file of results."""
    files = Files(folder)
    for name, only in order["cases"]:
        start = time.monotonic()
        if start > order["deadline"]:
            return
        case = Case.parse(name)
        (folder / "case").write_text(name)
        effort = contest.Effort(order["seconds"], order["energy_s"], order["deadline"])
        wanted = {variant: named[variant] for variant in only}
        skip = order["skip"].get(name)
        result = contest.run(order["suite"], case, wanted, effort, files.progress, skip)
        result["seconds"] = time.monotonic() - start
        with files.result.open("a") as stream:
            stream.write(json.dumps([name, result]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
