"""A stock Hugging Face Llama under ``backend="coda"``, beside plain torch.compile.

Builds an unmodified ``LlamaForCausalLM`` with random weights, feeds it real text (the licence of
this repository, one token a byte) and prints what was matched, what each GEMM absorbed, how far the
logits are from float32, and on a GPU how fast it is.

Usage: python examples/demo.py [--debug]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

import coda_inductor  # only to print its report: backend="coda" needs no import

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
#: (sequence length, the model) by device; "cuda" has the shape of Llama-3.2-1B.
SIZES = {
    "cpu": (256, {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
                  "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192}),
    "cuda": (4096, {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}),
}  # fmt: skip
ROUNDS = 20


def main() -> None:
    """Compile, run and print; see the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--debug", action="store_true", help="write graphs and kernel sources")
    debug = parser.parse_args().debug
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # A graph that comes out of torch's compile cache is not analysed again: nothing to show.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False

    length, shape = SIZES[device]
    model, tokens = build(shape, length, device)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    title(f"LlamaForCausalLM, {parameters:.0f}M parameters, bfloat16, {length} tokens, {where}")

    coda = torch.compile(model, backend="coda", options={"debug": debug})
    stock = torch.compile(model)
    with torch.no_grad():
        reference = logits(copy.deepcopy(model).float(), tokens)
        counters["coda"].clear()
        outputs = {
            "eager": logits(model, tokens),
            "torch.compile": compiled("torch.compile", stock, tokens),
            'backend="coda"': compiled('backend="coda"', coda, tokens),
        }
        show_report(dict(counters["coda"]))
        show_errors(outputs, reference)
        if device == "cuda":
            show_speed({"torch.compile": stock, 'backend="coda"': coda}, tokens)
        else:
            print("\nNo GPU here: the fused programs run as plain torch ops, compiled by Inductor.")
    if debug:
        folders = sorted({report.folder for report in coda_inductor.reports() if report.folder})
        print("\ngraphs and kernel sources:", *folders)


def build(shape: dict[str, int], length: int, device: str) -> tuple[nn.Module, Tensor]:
    """The model in bfloat16 with seeded random weights, and (1, ``length``) token ids."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, max_position_embeddings=length, use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    text = LICENSE.read_bytes()[:length]
    return model, torch.tensor([list(text)], device=device)


def logits(model: Callable[..., object], tokens: Tensor) -> Tensor:
    """(tokens, vocabulary) logits in the model's dtype."""
    return model(tokens).logits[0]  # type: ignore[attr-defined]


def compiled(name: str, model: Callable[..., object], tokens: Tensor) -> Tensor:
    """The logits of the first call, which compiles."""
    start = time.perf_counter()
    result = logits(model, tokens)
    print(f"compiled with {name:<16} in {time.perf_counter() - start:5.1f} s")
    return result


def show_report(matched: dict[str, int]) -> None:
    """What fired, and what each GEMM absorbed; layers that came out alike share one row."""
    title("matched")
    for name, count in sorted(matched.items()):
        print(f"{count:4} x {name}")
    if not matched:
        print("nothing")
    for report in coda_inductor.reports():
        alike: dict[object, list[coda_inductor.SiteReport]] = {}
        for site in report.sites:
            same = (site.shape, site.patterns, site.absorbed, site.how, site.reason)
            alike.setdefault(same, []).append(site)
        rows = [
            dataclasses.replace(
                sites[0],
                site=f"{len(sites)} x {sites[0].site}" if len(sites) > 1 else sites[0].site,
                bytes_before=sum(site.bytes_before for site in sites),
                bytes_after=sum(site.bytes_after for site in sites),
            )
            for sites in alike.values()
        ]
        title("what each GEMM absorbed")
        print(dataclasses.replace(report, sites=rows).table())
        print(f"memory traffic saved: {report.bytes_saved / 1e6:.1f} MB a call")


def show_errors(outputs: dict[str, Tensor], reference: Tensor) -> None:
    """Relative Frobenius error of the logits; the reference is the same model in float32."""
    title("error of the logits against the same model in float32")
    for name, output in outputs.items():
        error = (output.float() - reference).norm() / reference.norm()
        print(f"{name:<16} {error.item():.3e}")


def show_speed(models: dict[str, Callable[..., object]], tokens: Tensor) -> None:
    """Median device time of one forward; the models take turns, so that clocks drift for all."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(ROUNDS + 3):
        events = {}
        for name, model in models.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            model(tokens)
            end.record()
            events[name] = (start, end)
        torch.cuda.synchronize()
        if turn >= 3:  # the first rounds warm up
            for name, (start, end) in events.items():
                times[name].append(start.elapsed_time(end))
    title(f"time of one forward (median of {ROUNDS}, interleaved)")
    base = statistics.median(times["torch.compile"])
    for name, samples in times.items():
        median = statistics.median(samples)
        print(f"{name:<16} {median:7.2f} ms   {base / median:.3f}x")


def title(text: str) -> None:
    """A heading."""
    print(f"\n== {text}")


if __name__ == "__main__":
    main()
