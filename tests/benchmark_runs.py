# SPDX-License-Identifier: Apache-2.0
"""Runs of the benchmarks' command line, in a process of their own and without a GPU, and a layer in
plain torch with the interface of the hand-composed one.

Importing torch and transformers takes a job longer than its work at these sizes. So the command
line imports them once, and each job is a fork of that process instead of a new one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed


FORKING = """
import functools, multiprocessing, os, subprocess, sys
import torch._inductor.compile_fx, transformers.models.llama.modeling_llama
import coda_inductor.backend
from benchmarks import __main__, grid_job, grid_run, job, runner

class Job(multiprocessing.get_context("fork").Process):
    def __init__(self, folder, output, environment, main=job.main):
        super().__init__(target=self.work, args=(folder, output.fileno(), environment, main))
        self.start()

    def work(self, folder, output, environment, main):
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        main(folder)

    def poll(self):
        return self.exitcode

    def wait(self, seconds=None):
        self.join(seconds)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("a job", seconds)
        return self.exitcode

if "OP_BY_OP" in os.environ:
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx
    from coda_inductor import op_by_op

    def plain(gm, _inputs, **_how):
        return make_boxed_func(gm.forward)

    compile_fx.compile_fx = functools.partial(compile_fx.compile_fx, inner_compile=plain)
    op_by_op.compile_fx_inner = plain

runner._start = Job
grid_run._start = lambda *arguments: Job(*arguments, grid_job.main)
sys.argv[0] = "-m benchmarks"
__main__.main()
"""


def benchmarks(
    *arguments: str, forking: bool = False, op_by_op: bool = False
) -> subprocess.CompletedProcess:
    """``python -m benchmarks`` with `arguments`; what it printed is captured as text.

    `forking`: jobs are forks of this process, which has imported what they need. `op_by_op`: in
    them graphs run so, behind torch's passes and ours: most of the time was Inductor's compiler's.
    """
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **({"OP_BY_OP": "1"} if op_by_op else {})}
    command = [sys.executable, *(["-c", FORKING] if forking else ["-m", "benchmarks"]), *arguments]
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
