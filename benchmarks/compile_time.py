# SPDX-License-Identifier: Apache-2.0
"""Suite `compile`: seconds from the first call of a compiled Llama to its first result.

The runner starts one process with empty caches (cold) and a second with the caches it left (warm).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from . import llama
from .measure import Variants, register, synchronize

if TYPE_CHECKING:
    from .runner import Job


@torch.no_grad()
def run(job: Job, _variants: Variants) -> dict:
    """Compile the model of suite `llama` once with `job.backend`: ``{"first_call_s",
    "second_call_s"}``.

    The first call includes the import of our package, which a user also pays then.

    Raises whatever the backend raises: there is only one variant here.
    """
    model, draw = llama.build(job.size, job.length)
    tokens = draw()
    # Library initialization (cuBLAS handles, attention kernels) belongs to no backend.
    llama.logits(model, tokens)
    synchronize()
    start = time.perf_counter()
    register(job.backend)
    compiled = torch.compile(model, backend=job.backend)
    llama.logits(compiled, tokens)
    synchronize()
    return {"first_call_s": time.perf_counter() - start}
