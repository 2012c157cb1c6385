# SPDX-License-Identifier: Apache-2.0
"""What a Llama's forward pass leaves for its backward, as a formula of the layers."""

import torch
import transformers as hf
from checking import leave_custom_ops, slice_logits
from harness import Harness
from zoo.families import FAMILIES

from coda_inductor.dynamo import late_gradients
from coda_inductor.dynamo.attention import calls
from coda_inductor.graph.read import kind

T, D, HEADS, KV, HIDDEN, V = 128, 64, 4, 1, 256, 1024


def saved(layers: int, checkpoints: bool = False) -> tuple[int, Harness]:
    """Elements of the bfloat16 tensors that are saved, parameters and inputs aside."""
    config = hf.LlamaConfig(
        hidden_size=D, intermediate_size=HIDDEN, num_hidden_layers=layers, vocab_size=V,
        num_attention_heads=HEADS, num_key_value_heads=KV,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).bfloat16()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    harness = Harness(gate="always", strict=False)
    ids = torch.randint(0, V, (1, T))
    harness.train(lambda i: tuple(model(input_ids=i, labels=i, use_cache=False)[:2]), ids)
    values = [n.meta.get("val") for n in harness.saved if n.op != "placeholder"]
    values = [v for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.bfloat16]
    return sum(v.numel() for v in values), harness


def test_a_layer_saves_what_the_formula_says(monkeypatch):
    """Two residual streams, the operand of gate and up, attention's output and queries, keys and
    values; gate and up. Not saved: anything normalized, queries and keys before their rotation, the
    operand of their projections, the activation in front of down."""
    leave_custom_ops(monkeypatch)
    slice_logits(monkeypatch, 2**12)
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 1)
    monkeypatch.setattr(calls, "GROUPS_ON", "cpu")
    (two, _), (three, harness) = (saved(layers) for layers in (2, 3))
    wide = 5 + 2 * KV / HEADS  # tensors of width D
    assert three - two == T * (wide * D + 2 * HIDDEN)
    assert harness.counts["cross_entropy_backward"] == 1
    logits = [n for n in harness.saved if n.op != "placeholder" and n.meta["val"].numel() == T * V]
    assert len(logits) == 1


def test_a_checkpointed_layer_saves_its_input():
    _, harness = saved(3, checkpoints=True)  # where programs are plain ops, layers end in expands
    assert [str(n.target) for n in harness.saved].count("aten.expand.default") == 2


def base(node):
    """The tensor whose memory ``node`` is a view of, through what torch calls views."""
    while kind(node) in ("names", "turns", "detaches"):
        node = node.args[0]
    return node


def test_no_two_saved_tensors_are_one_memory():
    """A regression: of a LayerNorm's mean, the tensor and a reshape of it were saved. The compiled
    backward pass wrote over the one while the other was still to be read, and GPT-2's gradients
    were wrong, on a CPU with 1280 columns."""
    model, call, inputs = FAMILIES["GPT-2"](2)
    harness = Harness(gate="always", strict=False)
    harness.train(lambda *xs: call(model, *xs), *inputs)
    saved = [n for n in harness.saved if isinstance(n.meta.get("val"), torch.Tensor)]
    bases = [base(n) for n in saved]
    assert len(saved) > 3
    assert len(set(bases)) == len(bases), [n for n in saved if bases.count(base(n)) > 1]
