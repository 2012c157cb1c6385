# SPDX-License-Identifier: Apache-2.0
"""A stock Hugging Face Llama under ``backend="coda"``, beside plain torch.compile.

Its weights are random, its tokens this repository's licence, one a byte. Prints how long each takes
to compile, what was matched, what each GEMM absorbs, how far the logits are from float32, and on a
GPU how long one forward takes. Each compiles in a process of its own with empty caches, for whoever
compiles second finds much done; one more takes the times, with what these left in torch's caches.

Usage: python examples/demo.py [--debug]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

import coda_inductor  # only for its reports: backend="coda" needs no import

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
#: (sequence length, the model) by name; "cuda" has the shape of Llama-3.2-1B, "tiny" is for tests.
SIZES = {
    "tiny": (16, {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}),
    "cpu": (256, {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
                  "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192}),
    "cuda": (4096, {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}),
}  # fmt: skip
BACKENDS: dict[str, dict[str, Any]] = {"torch.compile": {}, "coda": {"backend": "coda"}}
STOCK, OURS = BACKENDS
SPEED, ROUNDS = "speed", 20


def main(argv: list[str] | None = None) -> None:
    """Measure and print; or, as one of the processes, be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--debug", action="store_true", help="write graphs and kernel sources")
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)  # for tests
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.part:
        what, folder = given.part
        part(what, folder, given.size, debug=given.debug)
        return
    flags = ["--debug"] * given.debug + (["--size", given.size] if given.size else [])
    with tempfile.TemporaryDirectory(prefix="coda_demo_") as name:
        found = {backend: measure(backend, Path(name), *flags) for backend in BACKENDS}
        ours = found[OURS]
        print(f"\n== {ours['title']}\ncompiled, each in a process of its own with empty caches:")
        for backend, one in found.items():
            print(f"  {backend:<16} {one['seconds']:6.1f} s")
        print("\n== matched")
        for pattern, count in sorted(ours["matched"].items()):
            print(f"{count:4} x {pattern}")
        for graph in ours["graphs"]:
            print(f"\n== what each GEMM absorbs\n{graph['text']}")
        print("\n== error of the logits against the same model in float32")
        errors = {backend: one["error"] for backend, one in found.items()}
        for backend, error in {"eager": ours["eager error"], **errors}.items():
            print(f"  {backend:<16} {error:.3e}")
        if ours["cuda"]:
            times = measure(SPEED, Path(name), *flags)
            print("\n== time of one forward (median, the two taking turns)")
            for backend, ms in times.items():
                print(f"  {backend:<16} {ms:7.2f} ms   {times[STOCK] / ms:.3f}x")
    if folders := sorted({graph["folder"] for graph in ours["graphs"] if graph["folder"]}):
        print("\ngraphs and kernel sources:", *folders)


def measure(what: str, folder: Path, *flags: str) -> dict[str, Any]:
    """What a process finds that compiles with a backend, or takes the times. It has caches below
    ``folder``; what it wrote to standard error is shown afterwards."""
    print("timing ..." if what == SPEED else f"compiling with {what} ...", flush=True)
    caches = {"TORCHINDUCTOR_CACHE_DIR": folder / what, "CODA_CACHE_DIR": folder / "kernels"}
    command = [sys.executable, __file__, *flags, "--part", what, str(folder)]
    environment = os.environ | {name: str(path) for name, path in caches.items()}
    done = subprocess.run(  # noqa: S603 (this very script)
        command, env=environment, check=False, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stderr}")
    print(done.stderr, end="")
    return json.loads((folder / "found.json").read_text())


def part(what: str, folder: str, size: str | None, *, debug: bool) -> None:
    """What :func:`measure` asked for, as a file."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length, shape = SIZES[size or device]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, max_position_embeddings=length, use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    tokens = torch.tensor([list(LICENSE.read_bytes()[:length])], device=device)
    with torch.no_grad():
        if what == SPEED:
            found: dict[str, Any] = speed(Path(folder), model, tokens)
        else:
            found = compiled(what, model, tokens, debug=debug)
    Path(folder, "found.json").write_text(json.dumps(found))


def logits(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """(tokens, vocabulary) logits in the model's dtype."""
    return model(tokens).logits[0]


def compiled(backend: str, model: nn.Module, tokens: Tensor, *, debug: bool) -> dict[str, Any]:
    """The first call under one backend: seconds, relative Frobenius errors of the logits against
    the same model in float32, and for coda what it did."""
    reference = logits(copy.deepcopy(model).float(), tokens)

    def error(output: Tensor) -> float:
        return ((output.float() - reference).norm() / reference.norm()).item()

    eager = error(logits(model, tokens))
    options = {"options": {"debug": True}} if debug and backend == OURS else {}
    how: dict[str, Any] = {**BACKENDS[backend], **options}
    function = torch.compile(model, **how)
    counters["coda"].clear()
    start = time.perf_counter()
    output = logits(function, tokens)
    if tokens.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    where = torch.cuda.get_device_name() if tokens.is_cuda else "CPU"
    return {
        "title": f"LlamaForCausalLM, {parameters:.0f}M parameters, bfloat16, "
                 f"{tokens.numel()} tokens, {where}, torch {torch.__version__}",
        "cuda": tokens.is_cuda,
        "seconds": seconds,
        "error": error(output),
        "eager error": eager,
        "matched": dict(counters["coda"]),
        "graphs": [told(report) for report in coda_inductor.reports()],
    }  # fmt: skip


def told(report: coda_inductor.GraphReport) -> dict[str, Any]:
    """A report without its programs."""
    saved = {how: sum(site.bytes_saved for site in report.sites if site.how == how) / 1e6
             for how in ("kernel", "reference")}  # fmt: skip
    text = f"{report.summary}.\n{report.table()}"
    if saved["kernel"]:
        text += f"\nmemory traffic saved: {saved['kernel']:.1f} MB a call"
    elif saved["reference"] > 0:
        text += f"\nAs kernels, they would move {saved['reference']:.1f} MB less a call."
    return {"text": text, "folder": report.folder}


def speed(caches: Path, model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Median milliseconds of one forward; the backends take turns, so that clocks drift for all."""
    functions: dict[str, Callable[..., Any]] = {}
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for backend, how in BACKENDS.items():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / backend)
        functions[backend] = torch.compile(model, **how)
        functions[backend](tokens)
    for _ in range(ROUNDS + 3):
        events = {}
        for backend, function in functions.items():
            events[backend] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[backend][0].record()
            function(tokens)
            events[backend][1].record()
        torch.cuda.synchronize()
        for backend, (start, end) in events.items():
            times[backend].append(start.elapsed_time(end))
    return {backend: statistics.median(samples[3:]) for backend, samples in times.items()}


if __name__ == "__main__":
    main()
