# SPDX-License-Identifier: Apache-2.0
"""A layer on a GPU: float32 falls back, and steps of training follow eager's."""

import copy
import logging

import pytest
import torch
from layers import compiled, errors, make

import coda_inductor
from coda_inductor import FallbackError
from coda_inductor.optim import Updated, in_backward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]


def inputs(rows: int, dtype=torch.bfloat16, *, trains: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(1)
    made = [torch.randn(1, rows, 256, device="cuda").to(dtype) for _ in range(2)]
    return [x.requires_grad_(trains) for x in made]


def test_wide_models_fall_back_with_one_warning(caplog):
    model, xs = make(torch.float32), inputs(64, torch.float32, trains=False)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "coda_inductor"):
        mine = compiled(model)(*xs)
        assert max(errors(mine, model(*xs))) < 1e-3  # torch's own TF32-free GEMMs
    assert [r.getMessage() for r in caplog.records if "float" in r.getMessage()]
    assert not any(site.fused for site in coda_inductor.reports()[-1].sites)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(FallbackError, match="no kernel"):
        compiled(model, strict=True)(*xs)


def train(model, call, count: int = 4, *, within: bool = False) -> None:
    """A few steps of AdamW with clipping; the same data for everybody. ``within`` the backward
    pass, there is nothing to clip."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    optimizer = in_backward(optimizer) if within else optimizer
    for step in range(count):
        torch.manual_seed(step)
        x, y = (torch.randn(1, 1024, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        loss = sum(o.float().square().mean() for o in call(x, y))
        loss.backward()
        updated = [isinstance(p.grad, Updated) for p in model.parameters()]
        assert {*updated} == {within}
        if not within:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def moved(model, start) -> torch.Tensor:
    """How far all parameters together have gone from where they were."""
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return torch.cat([(p.detach().float() - q.detach().float()).flatten() for p, q in pairs])


@pytest.mark.parametrize("how", [
    {"options": {"gate": "always"}},
    {"options": {"triton.cudagraphs": True, "gate": "always"}},
    {"mode": "reduce-overhead"},
], ids=["plain", "cudagraphs", "reduce-overhead"])  # fmt: skip
def test_training_steps_follow_eager(how):
    """Without gradients, or with stale ones, the distance would be the way itself."""
    start = make()
    mine, theirs = copy.deepcopy(start), copy.deepcopy(start)
    train(mine, torch.compile(mine, backend="coda", **how))
    train(theirs, theirs)
    way = moved(theirs, start)
    assert (moved(mine, start) - way).norm() < 0.4 * way.norm()


def test_updates_within_the_backward_pass_follow_eager(monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    start = make()
    mine, theirs = copy.deepcopy(start), copy.deepcopy(start)
    train(mine, torch.compile(mine, backend="coda", options={"gate": "always"}), within=True)
    train(theirs, theirs)
    way = moved(theirs, start)
    assert (moved(mine, start) - way).norm() < 0.4 * way.norm()
