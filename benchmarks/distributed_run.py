# SPDX-License-Identifier: Apache-2.0
"""Suite `distributed`: training steps of a stock Llama on all GPUs of a host.

    python -m benchmarks distributed --out DIR [--ways fsdp_blocks,...] [--sizes 8B,1B]

Each case is a torchrun of its own, with the variants interleaved in it: what a rank does wrong, or
waits for in vain, costs that case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tabulate import tabulate

from . import environment
from .distributed_job import VARIANTS
from .models import LLAMAS
from .wrapped import WAYS

#: Seconds that torchrun has for ending its ranks.
_PATIENCE = 40.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks distributed", description=__doc__)
    add = parser.add_argument

    def several(known):
        def parse(text: str) -> list[str]:
            names = text.split(",")
            if unknown := [name for name in names if name not in known]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
            return names

        return parse

    add("--out", type=Path, required=True, help="folder for the results")
    add("--ways", type=several(WAYS), default=list(WAYS), help=f"of {','.join(WAYS)} (all)")
    add("--sizes", type=several(LLAMAS), default=["8B", "1B"], help="default 8B (4 layers),1B")
    add(
        "--tokens",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[4096, 8192],
        help="of a step on each rank (default 4096,8192)",
    )
    add("--variants", type=several(VARIANTS), default=list(VARIANTS), help="all by default")
    add("--ranks", type=int, default=torch.cuda.device_count() or 2, help="default: the GPUs")
    add("--rounds", type=int, default=15, help="samples of each variant (default 15)")
    add("--timeout", type=float, default=240.0, help="seconds for one case (default 240)")
    add("--deadline", type=float, default=570.0, help="seconds for everything (default 570)")
    add("--commit", help="measured commit, where the tree is a copy without .git")
    return parser


def _case(options: argparse.Namespace, name: str, case: tuple, seconds: float) -> dict:
    """Run one case in its own processes; its result, or the reason why there is none."""
    way, size, tokens = case
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            f"--nproc-per-node={options.ranks}",
            *("-m", "benchmarks.distributed_job"),
            *(json.dumps([way, size, tokens, options.rounds, options.variants]), str(out)),
        ]
        with (options.out / "log.txt").open("a") as log:
            print(f"== {name}", file=log, flush=True)
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                done = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return {"errors": {"all": f"not done after {seconds:.0f} s"}}
            finally:
                _end(process)
        if done or not out.exists():
            return {"errors": {"all": f"torchrun ended with {done}, see log.txt"}}
        return json.loads(out.read_text())


def _end(process: subprocess.Popen) -> None:
    """Torchrun ends its ranks when it is asked to end, and leaves them behind when it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def table(results: dict) -> str:
    """What a terminal shows: milliseconds of each variant, ours beside the better of the others."""
    rows = []
    for name, found in results.items():
        variants = found.get("variants", {})
        ms = {key: value["median_ms"] for key, value in variants.items()}
        speed = ms["compile"] / ms["coda"] if {"compile", "coda"} <= ms.keys() else None
        said = found.get("decisions") or {}
        fused = f"{said['fused']} of {said['gemms']}" if said else None
        rows.append([name, *map(ms.get, VARIANTS), speed, fused, *found["errors"].values()])
    heads = ["ms", *VARIANTS, "speedup", "fused"]
    return tabulate(rows, heads, floatfmt=".3f", missingval="-")


def main(arguments: list[str]) -> None:
    """The command line, see the module docstring."""
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    described = environment.describe(["distributed", *arguments], options.commit)
    results: dict = {"environment": {**described, "ranks": options.ranks}, "distributed": {}}
    for case in itertools.product(options.ways, options.sizes, options.tokens):
        name = " ".join(map(str, case))
        left = options.deadline - (time.monotonic() - start)
        if left < 30:
            found = {"errors": {"all": "no time was left"}}
        else:
            found = _case(options, name, case, min(options.timeout, left))
        results["distributed"][name] = found
        (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(table({name: found}).splitlines()[-1], flush=True)
    print("\n" + table(results["distributed"]))
