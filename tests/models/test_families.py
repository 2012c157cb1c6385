# SPDX-License-Identifier: Apache-2.0
"""Model families that nobody wrote a template for: each is fused, as often as a formula in the
number of layers says, and agrees with eager, forward and backward: in float32, or where LayerNorms
are deferred, which needs 16 bits, to eager's own error in bfloat16, with the kernels' numerics.
"""

import copy
import functools

import pytest
import torch
from harness import Harness
from zoo.families import FAMILIES


def pre_norm(norm, gate=None, extra=0):
    """Two norms and two residuals a layer; the norm in front of the first layer follows an
    embedding and stays, the one behind the last is deferred past the head."""

    def counts(L):
        gates = {gate: L} if gate else {}
        return {norm: 2 * L, **gates, "residual": 2 * L, **({"epilogue": extra} if extra else {})}

    return counts


def parallel(L):
    """One norm and one residual a layer; the first layer's activation is behind no norm."""
    return {"layer_norm": L, "residual": L, "epilogue": 1}


llama_like = pre_norm("rms_norm", "swiglu")
#: Families whose queries and keys are rotated after their projections.
ROTATED = ("Llama", "Mistral", "Granite", "Gemma", "Gemma 2", "Mixtral", "Cohere", "StarCoder 2",
           "StableLM", "Phi")  # fmt: skip
# family -> what fires in L layers under no_grad, but for rotations
COUNTS = {
    "Llama": llama_like,
    "Qwen3": llama_like,
    "Granite": llama_like,
    "Phi-3": llama_like,  # gate and up in one weight
    "Gemma": pre_norm("rms_norm"),
    # Norms behind projections are read by residuals: their statistics; the gate; the capped head.
    "Gemma 2": lambda L: {"epilogue": 3 * L + 1},
    # The same, but for the cap.
    "Gemma 3": lambda L: {"epilogue": 3 * L},
    # The statistics of q's and k's norm, and of the two behind the projections.
    "OLMo 2": lambda L: {"epilogue": 4 * L, "swiglu": L},
    # Its norms are read by routers, and by experts through an index; the router's softmax.
    "Mixtral": lambda L: {"experts": L, "swiglu": L, "residual": L, "epilogue": L},
    "Cohere": lambda L: {"layer_norm": L, "swiglu": L, "residual": L},
    "StarCoder 2": pre_norm("layer_norm"),
    "StableLM": pre_norm("layer_norm", "swiglu"),
    "GPT-2": pre_norm("layer_norm"),
    "OPT": pre_norm("layer_norm", extra=1),  # the first layer scales q
    "Phi": parallel,
    "GPT-NeoX": lambda L: {**parallel(L), "layer_norm": 2 * L - 1},
    # The norms are read by residuals; the head has an activation.
    "BERT": lambda L: {"residual": 2 * L, "epilogue": L + 1},
    "ViT": lambda L: {"layer_norm": 2 * L - 1, "residual": 2 * L},  # the last reads one token
    # Encoder and decoder; the last norm's result is scaled for the tied head.
    "T5": lambda L: {"rms_norm": 5 * L - 1, "residual": 5 * L},
}
#: Families whose attention masks are made of constants, one use a layer. T5's encoder sees all, and
#: its biases are learned; the others come without a mask, or write attention out (transformers
#: 5.23; 5.17 builds masks for them too).
MASKED = COUNTS.keys() - {"Gemma 2", "OPT", "BERT", "ViT"}
#: Families whose layers differ by their place, and some whose do not; of others one layer says all.
TWO = ("Llama", "Gemma 2", "Mixtral", "OPT", "Phi", "GPT-NeoX", "ViT", "T5")
TRAINED = ("Qwen3", "Phi-3", "Gemma 2", "OLMo 2", "Mixtral", "GPT-2", "T5")


def make(family, layers):
    """(model, call, inputs, the error that is allowed beside the exact model's norm)."""
    model, call, inputs = FAMILIES[family](layers)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a gamma in the wrong place
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    half = "layer_norm" in COUNTS[family](layers)
    if half:
        model = model.bfloat16()
        inputs = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
    # In eval mode: no dropout, so that eager draws the same numbers, which is none.
    return model.eval(), call, inputs, half


def exactly(model, call, inputs):
    """``call`` with the model and the inputs in float64."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    return functools.partial(call, copy.deepcopy(model).double()), wide


class Counting(Harness):
    """Counts the calls of attention that come with a mask."""

    masked = 0

    def __call__(self, gm, inputs):
        for node in gm.graph.nodes:
            if getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
                mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
                self.masked += mask is not None
        return super().__call__(gm, inputs)


@pytest.mark.parametrize("family", COUNTS)
def test_family_fires_and_agrees(family):
    layers = 1 + (family in TWO)
    model, call, inputs, half = make(family, layers)
    harness = Counting(reference=half)
    ours = harness.run(functools.partial(call, model), *inputs)
    with torch.no_grad():
        eager = call(model, *inputs)
        if half:
            run, wide = exactly(model, call, inputs)
            exact = run(*wide)
            assert (ours - exact).norm() <= 1.2 * (eager - exact).norm()
        else:
            assert (ours - eager).norm() / eager.norm() < 1e-5
    masks = harness.counts.pop("constant_mask", 0)
    assert masks == (layers if harness.masked else 0)
    assert masks == layers or family not in MASKED
    assert harness.counts.pop("rotary", 0) == (2 * layers if family in ROTATED else 0)
    assert harness.counts == COUNTS[family](layers)


@pytest.mark.parametrize("family", TRAINED)
def test_family_trains(family):
    model, call, inputs, half = make(family, 1)
    harness, run = Harness(reference=half), functools.partial(call, model)
    runs = [(functools.partial(harness.train, run), model, inputs), (run, model, inputs)]
    if half:
        exact, wide = exactly(model, call, inputs)
        runs.append((exact, exact.args[0], wide))
    weights, found = None, []
    for step, of, given in runs:
        of.zero_grad()
        out = step(*given)
        weights = torch.randn(out.shape[-1]) if weights is None else weights
        (out * weights.to(out.dtype)).square().mean().backward()
        found.append([p.grad for p in of.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1])
    if half:
        ours, eager, exact = (torch.cat([g.double().flatten() for g in group]) for group in found)
        assert (ours - exact).norm() <= 1.2 * (eager - exact).norm()
    else:
        largest = max(gradient.norm() for gradient in found[1])
        for ours, eager in zip(*found, strict=True):  # a key's bias has only rounding noise
            assert (ours - eager).norm() <= 1e-4 * eager.norm() + 1e-6 * largest
    expected = COUNTS[family](1)
    for pattern in ("rms_norm", "layer_norm", "swiglu"):
        times = 0 if pattern == "layer_norm" else expected.get(pattern, 0)
        assert harness.counts[pattern] == harness.counts[f"{pattern}_backward"] == times
