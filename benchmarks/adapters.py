# SPDX-License-Identifier: Apache-2.0
"""What LoRA's adapters take, kernel by kernel: ``python -m benchmarks adapters OUT.json``.

Each case (widths of four Llama layers, rank) under torch.compile and coda in a process of its own,
which compile side by side and then take turns: milliseconds sustained, A B B A, peak, and
milliseconds by kind. A kernel is of rank r if a matrix of its launch has r rows or columns, or two
or three times as many. Rank 0 is the frozen model without adapters: what a step would take if they
were free, but for the first layer's gradients of q, k and v, which LoRA does not need. Adapters are
in bf16; in "8B 16 float32" as peft makes them, in "8B 16 nf4" on weights of 4 bits. With dropout in
front of them (``--dropout 0.1``) a case is called "8B 16 p0.1".
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tabulate import tabulate

from coda_inductor.runtime.op import OP

from . import account, headline, models, worth, worth_models

CASES = tuple(f"{size} {rank}" for size in ("1B", "8B") for rank in (0, 16, 64))
KINDS = ("GEMMs of rank r", "others of rank r", *account.KINDS, account.REST)
TURNS, LISTED = 4, 24


def main(arguments: list[str]) -> None:
    """Measure and print; or, as one of the processes, be measured."""
    parser = headline.parser_of("adapters", __doc__, "case")
    parser.add_argument("--dropout", type=float, help="in front of each adapter")
    options = parser.parse_args(arguments)
    if options.part:
        answer(options.part, options.file.with_suffix(".lock"))
        return
    masked = f" p{options.dropout}" if options.dropout else ""
    cases = [f"{case}{masked}" for case in options.names or CASES]
    names = [f"{case} {b}" for case in cases for b in ("compile", "coda")]
    found = headline.measured("adapters", names, options, TURNS)["results"]
    rows = []
    for name, result in found.items():
        if not result["samples"]:
            continue
        kinds = [f"{result['kinds'].get(kind, 0.0):.2f}" for kind in KINDS]
        rows.append([name, statistics.median(result["samples"]), result["peak"], *kinds])
        for kernel in result["kernels"][:LISTED] if " 0 " not in name else ():
            print("{us:8.0f} us {calls:4.0f} x {kind}: {name} {dims}".format(**kernel))
        print(f"^ {name}\n")
    print(tabulate(rows, ("", "ms", "peak GiB", *KINDS), "github", floatfmt=".2f"))


def answer(name: str, lock: Path) -> None:
    """Compile, then answer each line of stdin with a line of JSON."""
    sys.stdout = sys.stderr  # answers alone go to the other one
    size, rank, *own, backend = name.split()
    dropout = float(own.pop()[1:]) if own and own[-1][:1] == "p" else 0.0
    workload = worth_models.lora(size, int(rank), *own, dropout=dropout)
    models.make_causal(workload.model)
    step = workload.step((), {"compile": "inductor"}.get(backend, backend))
    with worth.compiled(step, lambda: worth.turn(lock)):
        line: Any = {"peak": worth.facts(step)["peak"]}
        # The dispatcher tells the profiler the shapes of what it calls; graphs go around it.
        direct, OP.direct = OP.direct, OP
        kernels = kinds(account.traced(step), int(rank))
        OP.direct = direct
    line["kernels"] = kernels
    line["kinds"] = defaultdict(float)
    for kernel in kernels:
        line["kinds"][kernel["kind"]] += kernel["us"] / 1e3
    for number, _ in enumerate(sys.stdin):
        if number:
            with worth.turn(lock):
                line = worth.sustained(step)
        print(json.dumps(line), flush=True, file=sys.__stdout__)


def kinds(events: Iterable[dict], rank: int) -> list[dict[str, Any]]:
    """The kernels of one step by kind, name and matrices of their launch."""
    found: dict[tuple, list[float]] = defaultdict(list)
    for event, launch in account.launched(events):
        kind = account.of_name(account.KINDS, event["name"], account.REST)
        pairs = re.findall(r"\[(\d+), (\d+)\]", json.dumps(launch.get("Input Dims")))
        dims = tuple((int(rows), int(columns)) for rows, columns in pairs)
        wide = (1, 2, 3) if kind == "GEMMs" else (1,)
        if rank and kind != "attention" and {m * rank for m in wide} & {s for d in dims for s in d}:
            kind = KINDS[0] if kind == "GEMMs" else KINDS[1]
        found[kind, event["name"][:70], dims].append(event["dur"])
    kernels = [
        {"kind": kind, "name": name, "dims": dims, "us": sum(each) / account.CALLS,
         "calls": len(each) / account.CALLS}
        for (kind, name, dims), each in found.items()
    ]  # fmt: skip
    return sorted(kernels, key=lambda kernel: -kernel["us"])
