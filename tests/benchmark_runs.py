# SPDX-License-Identifier: Apache-2.0
"""Runs of the benchmarks' real command line, in a process of their own and without a GPU, and a
layer in plain torch with the interface of the hand-composed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed


def benchmarks(*arguments: str) -> subprocess.CompletedProcess:
    """``python -m benchmarks`` with `arguments`; what it printed is captured as text."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


HAND_LAYER = """
import torch
from torch.nn.functional import rms_norm, silu

CFG = {"only": ()}


def warm(job):
    return job, "ok"


class Hand:
    def __init__(self, d, f, q, M):
        self.d, self.M = d, M
        self.Wo, self.Wgu, self.Wd = torch.zeros(d, d), torch.zeros(2 * f, d), torch.zeros(d, f)
        self.Wq, self.g1, self.g2 = torch.zeros(q, d), torch.zeros(d), torch.zeros(d)

    def weights(self):
        return self.Wo, self.Wgu, self.Wd, self.Wq, self.g1, self.g2

    def layer(self, x0, y, wo, wgu, wd, wq, g1, g2):
        x1 = x0 + y @ wo.t()
        pairs = rms_norm(x1, (self.d,), g1, 1e-5) @ wgu.t()
        x2 = x1 + (silu(pairs[:, 0::2]) * pairs[:, 1::2]) @ wd.t()
        return x2, rms_norm(x2, (self.d,), g2, 1e-5) @ wq.t()

    def fwd(self, x0, y):
        assert x0.shape == (self.M, self.d)
        assert not torch.is_grad_enabled()
        return *self.layer(x0, y, *self.weights()), (x0, y)

    def bwd(self, dx2, dqkv, saved):
        leaves = [t.detach().requires_grad_() for t in (*saved, *self.weights())]
        with torch.enable_grad():
            return torch.autograd.grad(self.layer(*leaves), leaves, (dx2, dqkv))
"""
