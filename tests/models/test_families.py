# SPDX-License-Identifier: Apache-2.0
"""Model families that nobody wrote a template for: each is fused, as often as a formula in the
number of layers says, and agrees with eager in float32, forward or backward. LayerNorms stay.
"""

import functools

import pytest
import torch
from harness import Harness
from zoo.families import FAMILIES


def llama_like(L):
    """Two norms and two residuals a layer; the norm in front of the first layer follows an
    embedding and stays, the one behind the last is deferred past the head."""
    return {"rms_norm": 2 * L, "swiglu": L, "residual": 2 * L}


#: Families whose queries and keys are rotated after their projections.
ROTATED = ("Llama", "Granite", "Gemma 2", "Mixtral", "Cohere")
#: family -> what fires in L layers under no_grad, but for rotations and constant masks; one a
#: shape of a layer
COUNTS = {
    "Llama": llama_like,
    "Granite": llama_like,  # residuals are scaled
    # Norms behind projections are read by residuals: their statistics; the gate; the capped head.
    "Gemma 2": lambda L: {"epilogue": 3 * L + 1},
    # The statistics of q's and k's norm, and of the two behind the projections.
    "OLMo 2": lambda L: {"epilogue": 4 * L, "swiglu": L},
    # Its norms are read by routers, and by experts through an index; the router's softmax.
    "Mixtral": lambda L: {"experts": L, "swiglu": L, "residual": L, "epilogue": L},
    "Cohere": lambda L: {"swiglu": L, "residual": L, "epilogue": 1},
    # Each layer scales q, and has an activation.
    "OPT": lambda L: {"residual": 2 * L, "epilogue": 2 * L},
    # One residual and one activation a layer.
    "GPT-NeoX": lambda L: {"residual": L, "epilogue": L},
    # The norms are read by residuals; the head has an activation.
    "BERT": lambda L: {"residual": 2 * L, "epilogue": L + 1},
    "ViT": lambda L: {"residual": 2 * L, "epilogue": L},
    # Encoder and decoder; the last norm's result is scaled for the tied head.
    "T5": lambda L: {"rms_norm": 5 * L - 1, "residual": 5 * L},
}
#: Families whose attention masks are made of constants, one use a layer, and need no other.
MASKED = ("Llama", "Granite", "OLMo 2", "Mixtral", "Cohere", "GPT-NeoX", "T5")
#: Families whose layers differ by their place; of others one layer says all.
TWO = ("Llama", "Gemma 2", "OPT", "GPT-NeoX", "ViT", "T5")
#: family -> what fires in one layer of a step, of these three, forward and backward.
TRAINED = {
    "Qwen3": {"rms_norm": 2, "swiglu": 1},
    "Phi-3": {"rms_norm": 2, "swiglu": 1},  # gate and up in one weight
    "Gemma 2": {},
    "T5": {"rms_norm": 4},
}


def make(family, layers):
    """(model, call, inputs)."""
    model, call, inputs = FAMILIES[family](layers)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a gamma in the wrong place
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    # In eval mode: no dropout, so that eager draws the same numbers, which is none.
    return model.eval(), call, inputs


@pytest.mark.parametrize("family", COUNTS)
def test_family_fires_and_agrees(family):
    layers = 1 + (family in TWO)
    model, call, inputs = make(family, layers)
    harness = Harness()
    ours = harness.run(functools.partial(call, model), *inputs)
    with torch.no_grad():
        eager = call(model, *inputs)
    assert (ours - eager).norm() / eager.norm() < 1e-5
    masks = harness.counts.pop("constant_mask", 0)
    assert masks == layers or family not in MASKED
    assert harness.counts.pop("rotary", 0) == (2 * layers if family in ROTATED else 0)
    assert harness.counts == COUNTS[family](layers)


@pytest.mark.parametrize("family", TRAINED)
def test_family_trains(family):
    model, call, inputs = make(family, 1)
    harness, run = Harness(), functools.partial(call, model)
    weights, found = None, []
    for step in (functools.partial(harness.train, run), run):
        model.zero_grad()
        out = step(*inputs)
        weights = torch.randn(out.shape[-1]) if weights is None else weights
        (out * weights).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    largest = max(gradient.norm() for gradient in found[1])
    for ours, eager in zip(*found, strict=True):  # a key's bias has only rounding noise
        assert (ours - eager).norm() <= 1e-4 * eager.norm() + 1e-6 * largest
    for pattern in ("rms_norm", "swiglu"):
        times = TRAINED[family].get(pattern, 0)
        assert harness.counts[pattern] == harness.counts[f"{pattern}_backward"] == times
