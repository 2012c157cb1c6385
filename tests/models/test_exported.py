# SPDX-License-Identifier: Apache-2.0
"""``torch.export.export(model, ...).module()``: what fires in it is what fires in the model, and it
computes the same."""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES
from harness import Harness
from torch import nn

#: RMSNorm and SwiGLU; GELU and LayerNorm; encoder and decoder.
NAMES = ("Llama", "GPT-2", "T5")


class Call(nn.Module):
    """A model as it is called: one tensor out."""

    def __init__(self, model, call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs):
        return self.call(self.model, *inputs)


def make(name, dtype):
    model, call, inputs = FAMILIES[name](1)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    return Call(model.eval().to(dtype), call), inputs


@pytest.mark.parametrize("name", NAMES)
def test_what_fires_is_what_fires_in_the_model(name):
    model, inputs = make(name, torch.bfloat16)  # LayerNorms of float32 models are left alone
    program = torch.export.export(model, inputs).module()
    want, have = Harness(reference=True), Harness(reference=True)
    values = [want.run(model, *inputs), have.run(program, *inputs)]
    # ViT's masks appear where it is exported only: they are written out, and found to be full.
    assert have.counts - want.counts in ({}, {"constant_mask": 1})
    assert not want.counts - have.counts
    assert sum(want.counts.values()) >= 3
    assert [s.program.key for s in have.fused] == [s.program.key for s in want.fused]
    torch.testing.assert_close(*values, rtol=0, atol=0)


def test_an_exported_program_trains():
    model, (ids,) = make("Llama", torch.float32)
    program = torch.export.export(copy.deepcopy(model), (ids,)).module()
    gradients, counts = [], []
    for each in (model, program):
        harness = Harness()
        harness.train(each, ids).square().mean().backward()
        gradients.append({name: p.grad for name, p in each.named_parameters()})
        counts.append(harness.counts)
    assert counts[0] == counts[1]
    assert counts[1]["rms_norm_backward"] == 2
    assert counts[1]["swiglu_backward"] == 1
    assert len(gradients[0]) == len(gradients[1])
    for name, want in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], want, rtol=1e-4, atol=1e-6)
