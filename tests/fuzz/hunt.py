# SPDX-License-Identifier: Apache-2.0
"""A night of random programs: ``make fuzz N=10000 SEED=0``.

Chunks of seeds run in processes of their own, so that neither a crash nor a compile that never ends
stops the hunt. Printed are scripts of what failed, reduced, then how often what fired. The exit
status is 1 if anything failed.

Usage: python tests/fuzz/hunt.py [N] [--seed SEED] [--jobs JOBS] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHUNK = 20
#: Wall time of a seed with its reduction, and of a chunk: past that a process is ended.
SECONDS = 400
#: Which mode each of twenty seeds is for; compiling to the end takes as long as ten others.
SHARES = ("inference",) * 7 + ("training",) * 8 + ("rounding",) * 4 + ("end_to_end",)


def main() -> int:
    """Hunt; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("number", nargs="?", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="folder for one script a failure")
    parser.add_argument("--chunk", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.chunk:
        return work(*args.chunk)
    last = args.seed + args.number
    starts = range(args.seed, last, CHUNK)
    with ThreadPoolExecutor(args.jobs) as pool:
        chunks = pool.map(lambda first: chunk(first, min(first + CHUNK, last)), starts)
        return summary(chunks, args.out)


def mode_of(seed: int) -> str:
    return SHARES[seed % len(SHARES)]


def work(first: int, last: int) -> int:
    """What a process of a chunk does: one line of JSON when a seed begins, one with its outcome."""
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
    import torch
    from fuzz_seeds import outcome, report

    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    for seed in range(first, last):
        say(seed=seed)
        found = outcome(mode_of(seed), seed)
        text = report(mode_of(seed), seed) if found.failure else ""
        say(seed=seed, report=text, invalid=found.invalid, counts=found.counts)
    return 0


def say(**what: Any) -> None:
    print("fuzz:", json.dumps(what), flush=True)


def chunk(first: int, last: int) -> list[dict[str, Any]]:
    """Outcomes of some seeds; a process that dies or hangs costs the seed it was at."""
    found: list[dict[str, Any]] = []
    while first < last:
        lines, end = process(first, last)
        done = [line for line in lines if "counts" in line]
        found += done
        first += len(done)
        if first < last:
            kind = f"{mode_of(first)} {first}: the process {end}"
            found.append({"seed": first, "report": kind, "invalid": "", "counts": {}})
            first += 1
    return found


def process(first: int, last: int) -> tuple[list[dict[str, Any]], str]:
    """(what a process said, how it ended)."""
    command = [sys.executable, "-W", "ignore", __file__, "--chunk", str(first), str(last)]
    # A session of its own, so that what it has started ends with it.
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = child.communicate(timeout=SECONDS + 30 * (last - first))
        end = f"ended with {child.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        out, _ = child.communicate()
        end = "did not end"
    marked = [line[6:] for line in out.splitlines() if line.startswith("fuzz: ")]
    return [json.loads(line) for line in marked], end


def summary(chunks: Any, out: Path | None) -> int:
    """Print what was found, as it comes."""
    counts: Counter = Counter()
    failed, invalid, programs = 0, 0, 0
    for result in (r for found in chunks for r in found):
        programs += 1
        invalid += bool(result["invalid"])
        counts.update(dict.fromkeys(result["counts"], 1))
        if result["report"]:
            failed += 1
            print(result["report"], "-" * 100, sep="\n", flush=True)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                # What comes before the script becomes part of its docstring.
                script = result["report"][max(0, result["report"].find('"""')) :]
                (out / f"seed_{result['seed']}.py").write_text(script)
    print(f"{programs} programs: {failed} failed, {invalid} say nothing")
    for name, times in sorted(counts.items()):
        print(f"  {name} fired in {times}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
