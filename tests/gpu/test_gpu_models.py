# SPDX-License-Identifier: Apache-2.0
"""Whole models of Hugging Face's at their real widths, two layers each, forward and backward: the
kernels run, and errors to float32 beside torch.compile's own."""

import copy
import gc
import math
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from zoo import families

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]

LAYERS, TOKENS = 2, 2048
#: Our error is at most torch.compile's, times this.
SLACK = 1.2


def widths(hidden: int, inner: int, heads: int, **more) -> dict:
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    return {**dict(zip(names, (hidden, inner, heads), strict=True)), **more}


#: Family -> how it is made, and what its config says of the model named behind it. The vocabularies
#: of BERT and GPT-2 are padded to a multiple of 8, as people pad them to train: strict mode refuses
#: the GEMM of the unpadded one's gradient.
DECODERS = {
    "Llama": widths(2048, 8192, 32, vocab_size=128256, num_key_value_heads=8),  # Llama-3.2-1B
    "Qwen3": widths(2048, 6144, 16, vocab_size=151936, num_key_value_heads=8, head_dim=128),  # 1.7B
    "Gemma2": widths(2304, 9216, 8, vocab_size=256000, num_key_value_heads=4, head_dim=256),  # 2B
    "Phi3": widths(3072, 8192, 32, vocab_size=32064, num_key_value_heads=32),  # mini
    # half as wide as 8x7B
    "Mixtral": widths(2048, 4096, 16, vocab_size=32000, num_key_value_heads=8),
}
OTHERS = {
    "GPT2": partial(
        families.gpt2, n_embd=1280, n_head=20, n_positions=TOKENS, vocab_size=50304,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "BERT": families.encoder(
        "BertForMaskedLM", "BertConfig", **widths(1024, 4096, 16), vocab_size=30528,
        max_position_embeddings=TOKENS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "T5": partial(
        families.t5, d_model=1024, d_ff=4096, num_heads=16, d_kv=64, vocab_size=32128,
        dropout_rate=0.0,
    ),
}  # fmt: skip
FAMILIES = {**{n: families.decoder(n, **how) for n, how in DECODERS.items()}, **OTHERS}


def outcome(function, own, x, up) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
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
def test_error_is_no_worse_than_torch_compiles_or_eagers(name):
    torch.manual_seed(0)
    with torch.device("cuda"):  # initializing a vocabulary's table takes long on a CPU
        model, call, _ = FAMILIES[name](LAYERS)
        x = torch.randint(model.config.vocab_size, (1, TOKENS))
    model = model.bfloat16().train()
    with torch.no_grad():
        up = torch.randn_like(call(model, x).float()) / x.numel()
    exact = copy.deepcopy(model).float()
    want = outcome(call, exact, x, up)
    del exact
    gc.collect()
    stock = errors(outcome(torch.compile(call), model, x, up), want)
    theirs = [*map(max, stock, errors(outcome(call, model, x, up), want))]
    torch._dynamo.reset()
    # Correctness, not speed: also the kernels that the gate would leave out at these sizes.
    ours = torch.compile(call, backend="coda", options={"strict": True, "gate": "always"})
    mine = errors(outcome(ours, model, x, up), want)
    fired = dict(counters["coda"])
    del model, want
    gc.collect()
    assert fired, "nothing was fused"
    assert all(m <= SLACK * t for m, t in zip(mine, theirs, strict=True)), (mine, stock, theirs)
