# SPDX-License-Identifier: Apache-2.0
"""One rank is killed between two steps of training: for ``test_distributed``."""

import os
import signal

import torch.distributed as dist
from checks_fsdp import LAYERS, loss_of, mine, sharded
from decoder import batches


def check_that_a_rank_dies():
    model = sharded()
    for step, tokens in enumerate(map(mine, batches(2, 4))):
        loss_of(model(tokens), tokens).backward()
        if step == LAYERS and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the others cannot go on without it")
