# SPDX-License-Identifier: Apache-2.0
"""The optimizer within the backward pass (``optim.in_backward``), beside ``step()`` after it.

``python -m benchmarks updates OUT.json --part bits --part 8B:32`` measures both ways on one model
with one optimizer, A B B A: the milliseconds of a step (``worth.sustained``) and the peak with
weights, gradients and states. "bits" compares weights after three steps, with a frozen embedding,
whose gradient is summed in any order. "8B:32:0.4" has the option ``memory``; "14B:40:0.4:adamw8" is
Qwen3 with 8-bit states of torchao, within the backward pass only. One GPU, 8192 tokens, bf16.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import coda_inductor
from coda_inductor.optim import Updated, in_backward

from . import environment, worth, worth_models

NAMES = {"8B": "8B-32", "14B": "qwen3_14b", "tiny": "tiny"}


def main(arguments: list[str]) -> None:
    """Measure each part and write after each."""
    parser = argparse.ArgumentParser("python -m benchmarks updates", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--part", action="append", default=[], help="bits, MODEL:LAYERS[:MEMORY[:adamw8]]"
    )
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    options = parser.parse_args(arguments)
    about = environment.describe(sys.argv[1:], options.commit, "benchmarks")
    for part in options.part:
        try:
            result = bits() if part == "bits" else whole(*part.split(":"))
        except Exception as error:  # noqa: BLE001 (the next part may work)
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        print(part, json.dumps(result), flush=True)
        environment.keep(options.file, about, {part: result})
        gc.collect()
        torch.cuda.empty_cache()
        if "error" in result:
            sys.exit(1)


def bits(name: str = "8B-32", layers: int = 2, steps: int = 3) -> dict[str, Any]:
    """Do both ways give the same weights?"""
    ours = worth_models.stock(name, layers)
    ours.model.get_input_embeddings().weight.requires_grad_(False)
    theirs = copy.deepcopy(ours.model)
    losses = [
        [float(step().detach()) for _ in range(steps)]
        for step in (stepping(theirs, ours.batch), stepping(ours.model, ours.batch, within=True))
    ]
    pairs = zip(ours.model.named_parameters(), theirs.parameters(), strict=True)
    different = [key for (key, one), other in pairs if not torch.equal(one, other)]
    return {"losses": losses, "different": different}


def whole(name: str, layers: str, memory: str = "", states: str = "") -> dict[str, Any]:
    """Milliseconds and peaks, A B B A; with "adamw8" within the backward pass alone."""
    workload = worth_models.stock(NAMES[name], int(layers))
    model, batch = workload.model, workload.batch
    if states:
        from torchao.optim import AdamW8bit

        optimizer: Any = AdamW8bit(model.parameters(), lr=1e-5)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    result: dict[str, Any] = {"weights": held()}
    steps = {}
    for within in (True,) if states else (False, True):
        key = "within" if within else "after"
        began = time.perf_counter()
        steps[key] = stepping(model, batch, optimizer, within=within, memory=memory)
        steps[key]()
        torch.cuda.synchronize()
        result[key] = {"first_s": time.perf_counter() - began, "ms": [], "peak": []}
        plan = coda_inductor.reports()[-1].memory
        result[key] |= {"updated": steps[key].updated, "plan": plan and str(plan)}
    for key in (*steps, *reversed(steps)):
        steps[key]()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result[key]["ms"].append(worth.sustained(steps[key], 2.0, 4.0, least=5))
        result[key]["peak"].append(torch.cuda.max_memory_allocated() / 2**30)
        print(key, result[key], flush=True)
    return result | {"states": held() - result["weights"]}


def held() -> float:
    """GiB that tensors hold now."""
    return torch.cuda.memory_allocated() / 2**30


def stepping(
    model: Any, batch: Any, optimizer: Any = None, *, within: bool = False, memory: str = ""
) -> Any:
    """A step, compiled at its first call; its result is the loss, and it has the attribute
    ``updated``. Its function is a new one, so that one model is compiled in both ways."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    kind = "within" if within else "after"
    space: dict[str, Any] = {"model": model}
    exec(f"def {kind}(batch):\n return model(**batch).loss", space)  # noqa: S102 (code of its own)
    options = {"memory": float(memory)} if memory else {}
    compiled = torch.compile(space[kind], backend="coda", dynamic=False, options=options)
    if within:
        in_backward(optimizer)

    def step() -> torch.Tensor:
        loss = compiled(batch)
        loss.backward()
        step.updated = sum(isinstance(p.grad, Updated) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step.updated = 0  # weights, in the last backward pass
    return step
