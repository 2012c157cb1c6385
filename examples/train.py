# SPDX-License-Identifier: Apache-2.0
"""Train a stock Hugging Face Llama on text under eager, torch.compile and ``backend="coda"``.

Every backend starts from the same random weights and sees the same batches: what separates two loss
curves is rounding. ``eager_reversed`` says how much that may be: eager with the rows of each batch
in reverse order. The text is this repository's and Python's own: nothing is downloaded.

Usage: python examples/train.py [--device cuda --size small] [--seeds 0,1,2] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
BACKENDS: dict[str, dict[str, Any] | None] = {  # what torch.compile is called with
    "eager": None,
    "eager_reversed": None,
    "inductor": {"backend": "inductor"},
    "coda": {"backend": "coda"},
    "coda_always": {"backend": "coda", "options": {"gate": "always"}},
}
#: Name -> widths, layers, heads and their groups; rows of a batch, tokens of each; learning rate.
SIZES = {
    "tiny": ((64, 128, 2, 4, 2), (8, 64), 3e-3),
    "small": ((1024, 2816, 6, 16, 4), (16, 1024), 6e-4),
}
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads")  # fmt: skip
HELD_OUT, LAST = 16, 20  # one row in so many; steps of a final loss


def rows_of_text(length: int) -> tuple[Tensor, Tensor]:
    """Rows of ``length`` bytes, uint8 on the CPU: those to train on, those held out."""
    pages = [ROOT / "LICENSE", *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    library = Path(sysconfig.get_path("stdlib"))
    files = [*pages, library / "pydoc_data" / "topics.py", *sorted(library.glob("*.py"))]
    text = b"\n".join(path.read_bytes() for path in files if path.is_file())
    whole = len(text) // length * length
    rows = torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).view(-1, length)
    held_out = torch.arange(len(rows)) % HELD_OUT == 0
    return rows[~held_out], rows[held_out]


def batches(rows: Tensor, size: int, seed: int, count: int) -> Iterator[Tensor]:
    """``count`` batches of ``size`` rows: shuffled epochs, in an order ``seed`` alone decides."""
    shuffle = torch.Generator().manual_seed(seed)
    epochs = math.ceil(count * size / len(rows))
    order = torch.cat([torch.randperm(len(rows), generator=shuffle) for _ in range(epochs)])
    for chosen in order.split(size)[:count]:
        yield rows[chosen].long()


def train(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run: the loss of each step (nats a byte), of held-out rows, and the median step in ms."""
    shape, (size, length), highest = SIZES[args.size]
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **dict(zip(FIELDS, shape, strict=True)),
        vocab_size=256, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    with torch.device(args.device):
        model = transformers.LlamaForCausalLM(config)
    torch._dynamo.reset()
    options = BACKENDS[name]
    function = model if options is None else torch.compile(model, **options)
    training, held_out = rows_of_text(length)

    def loss_of(tokens: Tensor) -> Tensor:
        tokens = (tokens.flip(0) if name == "eager_reversed" else tokens).to(args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=not args.no_autocast):
            return function(input_ids=tokens, labels=tokens).loss

    optimizer = torch.optim.AdamW(model.parameters(), highest, (0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )
    losses, ms = [], []
    for tokens in batches(training, size, seed, args.steps):
        start = time.perf_counter()
        loss = loss_of(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits
        ms.append((time.perf_counter() - start) * 1e3)
    count = min(20, len(held_out) // size)
    with torch.no_grad():
        found = [loss_of(tokens).item() for tokens in batches(held_out, size, 0, count)]
    return {"backend": name, "seed": seed, "losses": losses, "eval_loss": statistics.fmean(found),
            "step_ms": statistics.median(ms)}  # fmt: skip


def differences(runs: list[dict[str, Any]], of: Callable[[dict], float]) -> dict[str, float]:
    """Backend -> root mean square over the seeds of its ``of`` less eager's."""
    eager = {run["seed"]: of(run) for run in runs if run["backend"] == "eager"}
    squares: dict[str, list[float]] = {}
    for run in runs:
        if run["seed"] in eager:
            squares.setdefault(run["backend"], []).append((of(run) - eager[run["seed"]]) ** 2)
    return {name: math.sqrt(statistics.fmean(found)) for name, found in squares.items()}


def main() -> None:
    """Train every backend with every seed and print how far they are from eager."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", default="eager,inductor,coda", help=f"of {[*BACKENDS]}")
    parser.add_argument("--seeds", default="0", help="comma-separated numbers")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny", help="small needs a GPU")
    parser.add_argument("--no-autocast", action="store_true", help="no bfloat16 at all")
    parser.add_argument("--out", type=Path, help="write the runs to this file, JSON")
    args = parser.parse_args()
    names = args.backends.split(",")
    if unknown := {*names} - {*BACKENDS}:
        parser.error(f"--backends: unknown {', '.join(unknown)}; known: {', '.join(BACKENDS)}")
    runs: list[dict[str, Any]] = []
    for name in names:
        for seed in map(int, args.seeds.split(",")):
            runs.append(run := train(name, seed, args))
            losses = f"{run['losses'][0]:.3f} -> {run['losses'][-1]:.4f}"
            print(f"{name:<15} seed {seed}  {losses}, {run['step_ms']:.2f} ms a step", flush=True)
            if args.out:
                args.out.write_text(json.dumps(runs, indent=1) + "\n")
    last = differences(runs, lambda run: statistics.fmean(run["losses"][-LAST:]))
    held_out = differences(runs, lambda run: run["eval_loss"])
    for name, off in last.items():
        print(f"{name:<15} from eager: training loss {off:.5f}, evaluation {held_out[name]:.5f}")


if __name__ == "__main__":
    main()
