# SPDX-License-Identifier: Apache-2.0
"""What a step takes the host, so that the gate knows when the GPU waits for it.

    python benchmarks/host_steps.py [OUT.json]       # on the GPU; two minutes

Stacks of ``LAYERS`` layers too small to keep a GPU busy, forward and training, compiled by Inductor
and by this backend with everything fused. A line through the two: ``step_us`` is what a step takes
however many GEMMs it has (guards, autograd), ``gemm_us`` what each GEMM adds with all around it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import coda_inductor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import gradients, layer

ROWS, WIDTHS = 64, "512/2048/128"
LAYERS = (1, 4)
CALLS, ROUNDS = 10, 21
#: GEMMs of a layer as it is written: each has two more in the backward pass.
GEMMS = {"forward": 7, "training": 21}
WAYS = {"compile": ("inductor", None), "coda": ("coda", {"gate": "always"})}


class Stack(nn.Module):
    """Layers one behind another; each output but x of each is returned: (x, q, k, v, q, ...)."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        others: list[torch.Tensor] = []
        for block in self.blocks:
            x, *more = block(x, y)
            others += more
        return x, *others


def steps(count: int) -> dict[str, dict[str, Callable[[], object]]]:
    """For each mode and way, a step of ``count`` layers."""
    built = [layer.build(WIDTHS, ROWS, "hf") for _ in range(count)]
    stack, (x, y) = Stack([block for block, _, _ in built]), built[0][1:]
    with torch.no_grad():
        tangents = [torch.randn_like(out) for out in stack(x, y)]
    found: dict[str, dict[str, Callable[[], object]]] = {mode: {} for mode in GEMMS}
    for way, (backend, options) in WAYS.items():
        forward = torch.compile(stack, fullgraph=True, backend=backend, options=options)
        found["forward"][way] = torch.no_grad()(lambda f=forward: f(x, y))
        inputs = [x.detach().requires_grad_(), y.detach().requires_grad_()]
        found["training"][way] = gradients.step(forward, inputs, stack.parameters(), tangents)
    return found


def host_us(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of a step for each of ``calls``, interleaved; the GPU has less to do."""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 2):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
            rounds[name].append(1e6 * (time.perf_counter() - start) / CALLS)
    return {name: statistics.median(found[2:]) for name, found in rounds.items()}


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """{mode: {way: {"step_us", "gemm_us", and microseconds by the number of layers}}}."""
    by_layers = {}
    for count in LAYERS:
        torch._dynamo.reset()
        by_layers[count] = {mode: host_us(calls) for mode, calls in steps(count).items()}
    few, many = LAYERS
    found: dict[str, dict[str, dict[str, float]]] = {}
    for mode, gemms in GEMMS.items():
        found[mode] = {}
        for way in WAYS:
            us = {count: by_layers[count][mode][way] for count in LAYERS}
            each = (us[many] - us[few]) / (many - few)
            line = {"step_us": us[few] - few * each, "gemm_us": each / gemms}
            line |= {f"{count} layers": us[count] for count in LAYERS}
            found[mode][way] = {name: round(value, 1) for name, value in line.items()}
    return found


if __name__ == "__main__":
    print(Path(coda_inductor.__file__).parent, torch.__version__, torch.cuda.get_device_name())
    result = measure()
    for mode, ways in result.items():
        for way, line in ways.items():
            print(f"{mode:<9}{way:<8}", line)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
