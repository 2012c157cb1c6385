# SPDX-License-Identifier: Apache-2.0
"""What ``demo.py`` measures, each in a process of its own: who compiles second finds much done.

``python examples/demo_run.py OUT.json compile (torch.compile | coda)`` compiles a stock Hugging
Face Llama with random weights, on real text (this repository's licence, one token a byte), and
writes how long its first call took, what the backend did, and how far the logits are from float32.
``python examples/demo_run.py OUT.json speed FOLDER`` takes what those processes compiled out of
torch's caches, one folder a backend below FOLDER, and times one forward of each (GPU only).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
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
ROUNDS = 20


def main() -> None:
    """Measure one thing and write it as JSON; see the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=("compile", "speed"))
    parser.add_argument("of", help="torch.compile or coda; the folder of their caches for speed")
    parser.add_argument("--size", choices=SIZES, help="default: by device")
    parser.add_argument("--debug", action="store_true", help="write graphs and kernel sources")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length, shape = SIZES[given.size or device]
    model, tokens = build(shape, length, device)
    with torch.no_grad():
        if given.what == "compile":
            found = compiled(given.of, model, tokens, debug=given.debug)
        else:
            found = speed(Path(given.of), model, tokens)
    given.out.write_text(json.dumps(found))


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


def compiled(name: str, model: nn.Module, tokens: Tensor, *, debug: bool) -> dict[str, Any]:
    """The first call under one backend: seconds, relative Frobenius errors of the logits against
    the same model in float32, and for coda what it did."""
    reference = logits(copy.deepcopy(model).float(), tokens)

    def error(output: Tensor) -> float:
        return ((output.float() - reference).norm() / reference.norm()).item()

    eager = error(logits(model, tokens))
    options = {"options": {"debug": True}} if debug and name == "coda" else {}
    how: dict[str, Any] = {**BACKENDS[name], **options}
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
        "graphs": [_graph(report) for report in coda_inductor.reports()],
    }  # fmt: skip


def _graph(report: coda_inductor.GraphReport) -> dict[str, Any]:
    """A report without its programs."""
    saved = {
        how: sum(site.bytes_saved for site in report.sites if site.how == how) / 1e6
        for how in ("kernel", "reference")
    }
    text = f"{report.summary}.\n{report.table()}"
    if saved["kernel"]:
        text += f"\nmemory traffic saved: {saved['kernel']:.1f} MB a call"
    elif saved["reference"] > 0:
        text += (
            "\nNo kernel runs here: what is legal runs as plain ops, which Inductor compiles. As "
        )
        text += f"kernels, they would move {saved['reference']:.1f} MB less a call."
    return {"text": text, "folder": report.folder}


def speed(caches: Path, model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Median milliseconds of one forward; the backends take turns, so that clocks drift for all."""
    functions: dict[str, Callable[..., object]] = {}
    for name, how in BACKENDS.items():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / name)
        functions[name] = torch.compile(model, **how)
        functions[name](tokens)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(ROUNDS + 3):
        events = {}
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function(tokens)
            end.record()
            events[name] = (start, end)
        torch.cuda.synchronize()
        if turn >= 3:  # the first rounds warm up
            for name, (start, end) in events.items():
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(samples) for name, samples in times.items()}


if __name__ == "__main__":
    main()
