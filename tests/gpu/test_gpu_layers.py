# SPDX-License-Identifier: Apache-2.0
"""A layer on a GPU: steps of training follow eager's."""

import copy

import pytest
import torch
from layers import compiled, make

import coda_inductor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]


def train(model, call) -> None:
    """A few steps of AdamW with clipping; the same data for everybody."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(4):
        torch.manual_seed(step)
        x, y = (torch.randn(1, 1024, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        loss = sum(o.float().square().mean() for o in call(x, y))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def moved(model, start) -> torch.Tensor:
    """How far all parameters together have gone from where they were."""
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return torch.cat([(p.detach().float() - q.detach().float()).flatten() for p, q in pairs])


@pytest.mark.parametrize("backend", ["inductor", "coda"])
def test_training_steps_follow_eager(backend):
    """In Inductor's own passes, and replayed. Without gradients, or with stale ones, the distance
    would be the way itself."""
    start = make()
    mine, theirs = copy.deepcopy(start), copy.deepcopy(start)
    if backend == "coda":
        train(mine, compiled(mine, **{"triton.cudagraphs": True}))
    else:
        with coda_inductor.enabled(gate="always", strict=True):
            train(mine, torch.compile(mine))
    assert coda_inductor.reports()[-1].kernels
    train(theirs, theirs)
    way = moved(theirs, start)
    assert (moved(mine, start) - way).norm() < 0.4 * way.norm()
