# SPDX-License-Identifier: Apache-2.0
"""As ``dying``, with kernels and NCCL: for ``tests/gpu/test_gpu_distributed.py``."""

import os
import signal

import torch
import torch.distributed as dist
from checks_cuda import BACKEND, INDUCTOR, losses, sharded

__all__ = ["BACKEND", "INDUCTOR", "PATIENCE", "check_that_a_rank_dies"]
#: Seconds that NCCL waits for a rank.
PATIENCE = 20


def check_that_a_rank_dies():
    own, step = sharded("coda")
    losses(own, step, 2, split=True)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    losses(own, step, 2, split=True)
    torch.cuda.synchronize()
    raise AssertionError("the others cannot go on without it")
