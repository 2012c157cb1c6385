# SPDX-License-Identifier: Apache-2.0
"""A stock Hugging Face Llama under ``backend="coda"``, beside plain torch.compile.

Its weights are random, its tokens this repository's license, one a byte. Prints what was matched,
what each GEMM absorbs, the error of the logits against float32, and on a GPU the time of a forward.

Usage: python examples/demo.py [--debug]
"""

import copy
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

import coda_inductor  # only for its reports: backend="coda" needs no import

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
#: On a GPU the shape of Llama-3.2-1B.
LENGTH = 4096 if ON_GPU else 256
SIZES = (2048, 8192, 32, 8, 128256, 16) if ON_GPU else (512, 1408, 8, 4, 8192, 4)
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "num_hidden_layers")  # fmt: skip
ROUNDS = 20


def main(*flags: str) -> None:
    """Compile under both backends, and print."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**dict(zip(NAMES, SIZES, strict=True)), use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    tokens = torch.tensor([list(LICENSE.read_bytes()[:LENGTH])], device=DEVICE)
    options: dict[str, Any] = {"debug": True} if "--debug" in flags else {}
    ways = {"eager": model, "torch.compile": torch.compile(model)}
    ways["coda"] = torch.compile(model, backend="coda", options=options)
    with torch.no_grad():
        reference = copy.deepcopy(model).float()(tokens).logits
        found = {name: way(tokens).logits for name, way in ways.items()}
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"\n== LlamaForCausalLM, {parameters:.0f}M parameters, bfloat16, {tokens.numel()} "
              f"tokens, {torch.cuda.get_device_name() if ON_GPU else 'CPU'}")  # fmt: skip
        print("\n== matched")
        for pattern, count in sorted(counters["coda"].items()):
            print(f"{count:4} x {pattern}")
        for report in coda_inductor.reports():
            print(f"\n== what each GEMM absorbs\n{report.summary}.\n{report.table()}")
            for how, said in (("kernel", "saved"), ("reference", "that kernels would save")):
                saved = sum(site.bytes_saved for site in report.sites if site.how == how)
                if saved > 0:
                    print(f"memory traffic {said}: {saved / 1e6:.1f} MB a call")
            print("graphs and kernel sources:", report.folder) if report.folder else None
        print("\n== error of the logits against the same model in float32")
        for name, logits in found.items():
            error = (logits.float() - reference).norm() / reference.norm()
            print(f"  {name:<16} {error.item():.3e}")
        if ON_GPU:
            times = speed({name: way for name, way in ways.items() if name != "eager"}, tokens)
            print("\n== time of one forward (median, the two taking turns)")
            for name, ms in times.items():
                print(f"  {name:<16} {ms:7.2f} ms   {times['torch.compile'] / ms:.3f}x")


def speed(ways: dict[str, nn.Module], tokens: Tensor) -> dict[str, float]:
    """Median milliseconds of one forward; the ways take turns, so that clocks drift for all."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        events: dict[str, Any] = {}
        for name, way in ways.items():
            events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[name][0].record()
            way(tokens)
            events[name][1].record()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(samples) for name, samples in times.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
