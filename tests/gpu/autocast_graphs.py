# SPDX-License-Identifier: Apache-2.0
"""Run by ``test_gpu_memory.py`` in processes of their own: a float32 layer trains under autocast,
its steps replayed as CUDA graphs. Usage: autocast_graphs.py SEED"""

from __future__ import annotations

import copy
import sys

import torch
from layers import Layer

torch.manual_seed(int(sys.argv[1]))
model = Layer().cuda()
eager = copy.deepcopy(model)
run = torch.compile(model, backend="coda", options={"gate": "always", "triton.cudagraphs": True})
for _ in range(6):
    xs = [torch.randn(264, 256, device="cuda") for _ in range(2)]
    found = []
    for call, of in ((run, model), (eager, eager)):
        torch.compiler.cudagraph_mark_step_begin()
        of.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = call(*xs)
        sum(o.float().square().mean() for o in out).backward()
        found.append([p.grad.clone() for p in of.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm(), "gradients differ"
