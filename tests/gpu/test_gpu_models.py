# SPDX-License-Identifier: Apache-2.0
"""Whole models of Hugging Face's at their real widths, two layers each, forward and backward: the
kernels run, and errors to float32 beside torch.compile's own."""

from __future__ import annotations

import copy
import gc
import math
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]

LAYERS, TOKENS = 2, 2048
#: Our error is at most torch.compile's, times this.
SLACK = 1.2


def widths(hidden: int, inner: int, heads: int, vocabulary: int, **more) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        **more,
    }


#: Family -> what its config says of the model named behind it.
DECODERS = {
    "Llama": widths(2048, 8192, 32, 128256, num_key_value_heads=8),  # Llama-3.2-1B
    "Qwen3": widths(2048, 6144, 16, 151936, num_key_value_heads=8, head_dim=128),  # 1.7B
    "Mistral": widths(4096, 14336, 32, 32000, num_key_value_heads=8),  # 7B
    "Gemma2": widths(2304, 9216, 8, 256000, num_key_value_heads=4, head_dim=256),  # 2B
    "Phi3": widths(3072, 8192, 32, 32064, num_key_value_heads=32),  # mini
    "Mixtral": widths(2048, 4096, 16, 32000, num_key_value_heads=8),  # half as wide as 8x7B
}
#: The vocabularies of BERT and GPT-2 are padded to a multiple of 8, as people pad them to train:
#: strict mode refuses the GEMM of the unpadded one's gradient.
BERT, VIT = widths(1024, 4096, 16, 30528), widths(1024, 4096, 16, 0)
FAMILIES = (*DECODERS, "GPT2", "BERT", "ViT", "T5")


def build(name: str):
    """(model, call, inputs) on the default device; ``call(model, inputs)`` gives one tensor."""
    import transformers as hf

    sys.path.append(str(Path(__file__).parents[1] / "models"))
    from families import decoder

    torch.manual_seed(0)
    if name in DECODERS:
        model, call, _ = decoder(name, **DECODERS[name])(LAYERS)
    elif name == "GPT2":
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=1280, n_layer=LAYERS, n_head=20, n_positions=TOKENS,
                          vocab_size=50304, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        )  # fmt: skip

        def call(model, ids):
            return model(ids, use_cache=False).logits
    elif name == "BERT":
        how = {"max_position_embeddings": TOKENS, "hidden_dropout_prob": 0.0}
        config = hf.BertConfig(
            **BERT, **how, num_hidden_layers=LAYERS, attention_probs_dropout_prob=0.0
        )
        model = hf.BertForMaskedLM(config)

        def call(model, ids):
            return model(ids).logits
    elif name == "T5":
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(d_model=1024, d_ff=4096, num_layers=LAYERS, num_heads=16, dropout_rate=0.0)
        )

        def call(model, ids):
            return model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
    else:
        config = hf.ViTConfig(
            **{k: v for k, v in VIT.items() if k != "vocab_size"}, num_hidden_layers=LAYERS
        )
        model = hf.ViTForImageClassification(config)

        def call(model, image):
            return model(image).logits

    if name == "ViT":
        return model, call, torch.randn(16, 3, 224, 224)
    return model, call, torch.randint(model.config.vocab_size, (1, TOKENS))


def outcome(function, own, x, up) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The output, and all gradients."""
    y = function(own, x)
    y.backward(up.to(y.dtype))
    grads = [p.grad for p in own.parameters() if p.grad is not None]
    own.zero_grad(set_to_none=True)
    return [y.detach()], grads


def errors(found, exact) -> list[float]:
    """Of the output and of all gradients as one vector each: |found - exact| / |exact|."""

    def norm(tensors) -> float:
        return math.hypot(*(t.norm().item() for t in tensors))

    return [
        norm(a.float() - b for a, b in zip(mine, theirs, strict=True)) / norm(theirs)
        for mine, theirs in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_error_is_no_worse_than_torch_compiles(name):
    compare(name, "cuda")


def compare(name: str, device: str) -> None:
    with torch.device(device):  # initializing a vocabulary's table takes long on a CPU
        model, call, x = build(name)
    model = model.bfloat16().train()
    half = x.bfloat16() if x.is_floating_point() else x
    with torch.no_grad():
        up = torch.randn_like(call(model, half).float()) / half.numel()
    exact = copy.deepcopy(model).float()
    want = outcome(call, exact, half.float() if x.is_floating_point() else x, up)
    del exact
    gc.collect()
    theirs = errors(outcome(torch.compile(call), model, half, up), want)
    torch._dynamo.reset()
    # Correctness, not speed: also the kernels that the gate would leave out at these sizes.
    ours = torch.compile(call, backend="coda", options={"strict": True, "gate": "always"})
    mine = errors(outcome(ours, model, half, up), want)
    fired = dict(counters["coda"])
    del model, want
    gc.collect()
    assert fired, "nothing was fused"
    assert all(m <= SLACK * t for m, t in zip(mine, theirs, strict=True)), (mine, theirs)
