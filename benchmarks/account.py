# SPDX-License-Identifier: Apache-2.0
"""Where a training step goes, to the last kernel: ``python -m benchmarks account``.

A step of a stock model (forward and backward, no optimizer) by the profiler: GEMMs, attention,
collectives, and each kernel that is none of them, with the bytes of its tensors, what these take at
full bandwidth, and who made it. A kernel's tensors are those of its launch: each counts once,
whether it is read, written or both, and whole. Kernels of the same name are one line. *idle* is
when no kernel runs, between the first one and the last of all steps.
"""

import argparse
import dataclasses
import itertools
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from coda_inductor.gpu import gpu_of

from . import energy, environment, models, worth_models
from .measure import Call, device, synchronize, table

MODELS = ("1B", "8B", "qwen3", "gemma3")
VARIANTS = ("coda", "compile_causal", "compile")
CALLS = 3
#: Seconds that a step repeats for its energy and its clock.
ENERGY_S = 1.5
#: The kinds, each with the names of its kernels; what matches none is the rest.
KINDS = {
    "collectives": re.compile("nccl", re.IGNORECASE),
    "attention": re.compile("flash|fmha|sdpa|attention|cudnn", re.IGNORECASE),
    "GEMMs": re.compile("nvjet|cublas|cutlass|gemm|splitk", re.IGNORECASE),
}
REST = "rest"
IDLE = "idle"
#: Who made the kernels of the rest.
MAKERS = {
    "Inductor": re.compile("^triton_"),
    "coda": re.compile("^_(cast|amax|dlogits)_kernel|coda"),
    "CUDA": re.compile("^mem(cpy|set)", re.IGNORECASE),
    "aten": re.compile("at::|at_cuda|at_op"),
}
#: What the profiler calls that which runs on the device.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
#: Bytes of an element by the profiler's names of dtypes.
_BYTES = {
    "c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "bool": 1, "unsigned char": 1,
    "signed char": 1, "int": 4, "long int": 8, "long": 8,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip


@dataclasses.dataclass
class Kernel:
    """All launches of one name in a step.

    Attributes:
        kind: a key of KINDS, or REST.
        maker: a key of MAKERS, or "library".
        us: microseconds on the device.
        calls: launches.
        bytes: of the tensors of all launches; 0 where the profiler names none.
    """

    kind: str
    maker: str
    us: float = 0.0
    calls: float = 0.0
    bytes: float = 0.0


def of_name(kinds: dict[str, re.Pattern[str]], name: str, other: str) -> str:
    """The first of `kinds` that `name` matches, or `other`."""
    return next((kind for kind, pattern in kinds.items() if pattern.search(name)), other)


def read(events: Iterable[dict], calls: int) -> dict[str, Kernel]:
    """Name -> :class:`Kernel` of one of `calls` steps, from the events of a Chrome trace."""
    found: dict[str, Kernel] = {}
    for event, launch in launched(events):
        name = event["name"]
        kind, maker = of_name(KINDS, name, REST), of_name(MAKERS, name, "library")
        kernel = found.setdefault(name, Kernel(kind, maker))
        kernel.us += event["dur"] / calls
        kernel.calls += 1 / calls
        kernel.bytes += tensor_bytes(launch) / calls
    return found


def launched(events: Iterable[dict]) -> Iterator[tuple[dict, dict]]:
    """What ran on the device, each with the arguments of its launch: of the innermost event of the
    host with its external id. A copy says what it moves, whoever asked for it."""
    events = list(events)
    args = [event.get("args", {}) for event in events]
    known = {a["External id"]: a for a in args if "Input Dims" in a and "External id" in a}
    for event, given in zip(events, args, strict=True):
        if event.get("cat") in ON_DEVICE:
            own = event["cat"] != "kernel"
            yield event, given if own else known.get(given.get("External id"), given)


def idle_us(events: Iterable[dict], calls: int) -> float:
    """Microseconds of one of `calls` steps in which nothing ran, whatever the stream."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ON_DEVICE)
    end = spans[0][0] if spans else 0.0
    idle = 0.0
    for start, stop in spans:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle / calls


def tensor_bytes(launch: dict) -> int:
    """Bytes of the tensors among the arguments of a launch, or that a copy says it moves."""
    if "Input Dims" not in launch:
        return int(launch.get("bytes", 0))
    total = 0
    for shape, dtype in zip(launch["Input Dims"], launch.get("Input type", ()), strict=False):
        if shape and dtype in _BYTES and all(isinstance(size, int) for size in shape):
            total += _BYTES[dtype] * torch.Size(shape).numel()
    return total


def traced(call: Call, calls: int = CALLS) -> list[dict]:
    """The events of so many calls, which are warm."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as trace:
        for _ in range(calls):
            call()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def shares(kernels: dict[str, Kernel], idle: float) -> dict[str, float]:
    """Milliseconds of each kind, of `idle` microseconds, and of all."""
    found: dict[str, float] = defaultdict(float)
    for kernel in kernels.values():
        found[kernel.kind] += kernel.us / 1e3
    found[IDLE] = idle / 1e3
    return {**{kind: found[kind] for kind in (*KINDS, REST, IDLE)}, "all": sum(found.values())}


def text(
    kernels: dict[str, Kernel], idle: float, bytes_per_us: float, least_us: float = 10.0
) -> str:
    """Two tables: the kinds, and the kernels of the rest of at least so many microseconds."""
    known = shares(kernels, idle)
    kinds = [[kind, f"{ms:.2f}", f"{ms / known['all']:.1%}"] for kind, ms in known.items()]
    rest = sorted(
        ((name, k) for name, k in kernels.items() if k.kind == REST), key=lambda item: -item[1].us
    )
    shown = [(name, k) for name, k in rest if k.us >= least_us]
    figures = ("{0.maker}", "{0.calls:.0f}", "{0.us:.0f}", "{1:.1f}", "{2:.0f}")
    rows = [
        [name[:90], *(form.format(k, k.bytes / 1e6, k.bytes / bytes_per_us) for form in figures)]
        for name, k in shown
    ]
    less = sum(k.us for _, k in rest) - sum(k.us for _, k in shown)
    rows.append([f"{len(rest) - len(shown)} shorter ones", "", "", f"{less:.0f}", "", ""])
    heads = ["kernel", "made by", "calls", "us", "MB", "us at full bandwidth"]
    return f"{table(kinds, ['', 'ms', 'of the step'], 'simple')}\n\n{table(rows, heads, 'simple')}"


def main(arguments: Sequence[str]) -> None:
    """Print the account of each model under each backend; ``--out`` gets it as JSON."""
    parser = argparse.ArgumentParser("python -m benchmarks account", description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=models.MODELS)
    parser.add_argument("--variants", nargs="+", default=VARIANTS[:2], choices=VARIANTS)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--commit", default="", help="measured commit, where there is no .git")
    options = parser.parse_args(arguments)
    if device() != "cuda":
        parser.error("there is no GPU: an account is of kernels on one")
    full = gpu_of(torch.device("cuda", torch.cuda.current_device())).bytes_per_us
    about = environment.describe(["account", *arguments], options.commit or None)
    found: dict[str, Any] = {}
    for name, variant in itertools.product(options.models, options.variants):
        if variant == "compile_causal" and name not in models.CAUSAL:
            continue
        torch.compiler.reset()
        torch.cuda.empty_cache()
        workload = worth_models.stock(name, layers=worth_models.ALL)
        if variant == "compile_causal":
            models.make_causal(workload.model)
        call = workload.step((), "coda" if variant == "coda" else "inductor")
        call()
        call()
        events = traced(call)
        kernels, idle = read(events, CALLS), idle_us(events, CALLS)
        print(f"\n{name}, {worth_models.TOKENS} tokens, {variant}\n\n{text(kernels, idle, full)}")
        try:
            power = energy.joules(call, ENERGY_S, energy.Counter())
            kept = ", ".join(f"{k} {share:.0%}" for k, share in power["limits"].items())
            clock = "{watts:.0f} W, {mhz:.0f} MHz, where it repeats".format(**power)
            print(f"\n{clock}; what kept the clock down, part of the time: {kept or 'nothing'}")
        except energy.EnergyError as error:
            power = {}
            print(f"\nno energy: {error}")
        found[f"{name}-{worth_models.TOKENS}-{variant}"] = {
            "ms": shares(kernels, idle),
            "energy": power,
            "kernels": {k: dataclasses.asdict(v) for k, v in kernels.items()},
        }
        if options.out:  # each time: the next one may run out of time
            whole = {"environment": about, "bytes_per_us": full, "account": found}
            options.out.write_text(json.dumps(whole, indent=1) + "\n")
