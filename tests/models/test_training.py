# SPDX-License-Identifier: Apache-2.0
"""Training through ``backend="coda"`` and Inductor's code generation: several steps follow eager's.

Each test compiles a decoder of one layer, which takes seconds; what needs no generated code is in
``test_training_contexts``.
"""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import Decoder
from torch._dynamo.utils import counters
from training import assert_close, gradients, loss_of, not_reentrant, tokens

from coda_inductor.backend import coda

STEPS = 4


def follow(model, *optimizers_of, clip):
    """Train ``model`` compiled and a copy of it in eager, with one optimizer after another; losses
    and parameters stay together."""
    ours, eager = model, copy.deepcopy(model)
    compiled = torch.compile(ours, backend=coda, options={"strict": True})
    for optimizer_of in optimizers_of:
        steps([(compiled, ours, optimizer_of(ours)), (eager, eager, optimizer_of(eager))], clip)
    assert counters["coda"]["rms_norm_backward"] == counters["coda"]["rms_norm"] == 2


def steps(pairs, clip):
    """Of both pairs of a call, its module and the optimizer."""
    for _ in range(STEPS):
        ids, losses = tokens(4, 8), []
        for call, module, optimizer in pairs:
            optimizer.zero_grad()
            loss = loss_of(call(ids), ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) <= 1e-3 * abs(losses[1])
    states = [module.state_dict() for _, module, _ in pairs]
    assert_close(*states, 1e-3)


def adamw(**kind):
    # eps beside the gradients, or the first steps divide rounding noise by itself
    return lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3, **kind)


def test_optimizers_of_tied_checkpointed_blocks():
    """What is compiled for one optimizer trains with another, gradients clipped."""
    model = Decoder(1, tied=True, each=not_reentrant)
    follow(model, adamw(foreach=True), adamw(fused=True), clip=0.1)


def test_dropout_draws_eagers_numbers():
    model, ids = Decoder(1, dropout=0.3), tokens(4, 8)
    found = []
    with torch._inductor.config.patch(fallback_random=True):
        for call in (torch.compile(model, backend=coda, options={"strict": True}), model):
            model.zero_grad()
            torch.manual_seed(3)
            loss_of(call(ids), ids).backward()
            found.append(gradients(model))
    assert_close(*found, 1e-4)
    # Masks lie between the GEMMs and the residuals, which they keep apart.
    assert counters["coda"]["swiglu_backward"] == 1


def test_double_backward_is_a_clear_error_and_training_and_evaluation_go_on():
    model, ids = Decoder(1), tokens(4, 8)
    compiled = torch.compile(model, backend=coda, options={"strict": True})
    found = torch.autograd.grad(loss_of(compiled(ids), ids), [model.norm.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        found[0].sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(compiled(ids), ids).backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)
    assert counters["coda"]["rms_norm"] == 2 * 2  # the graph that trains and the other
    assert counters["coda"]["rms_norm_backward"] == 2
