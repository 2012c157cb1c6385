# SPDX-License-Identifier: Apache-2.0
"""Models that explain is tried on, each explained once a test run."""

import functools

import torch
import transformers as hf
from torch import nn

from coda_inductor import explain

SMALL = {
    "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip
LAYERS = 3


def llama(layers=LAYERS, dtype=torch.bfloat16):
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=2, num_hidden_layers=layers)
    return hf.LlamaForCausalLM(config).to(dtype)


class Residual(nn.Module):
    """32 x 64 -> 256 -> 64: sizes that are easy to count bytes of."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(64, 256, bias=False), nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Nothing(nn.Module):
    """A product in front of a sort, and an odd width."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 63, bias=False), nn.Linear(63, 64, bias=False)

    def forward(self, x):
        return self.second(self.first(x).sort(-1).values)


def _tokens(width=64):
    return torch.arange(width).view(1, width)


def _gpt2():
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, **ids)
    return hf.GPT2LMHeadModel(config).bfloat16().eval()


def _encoder():
    return nn.TransformerEncoderLayer(64, 4, 256, batch_first=True).bfloat16().train()


def _rows(width=64):
    return torch.ones(2, 16, width, dtype=torch.bfloat16)


#: name -> (model, args, kwargs, does it train)
SUBJECTS = {
    "llama": lambda: (llama(), (_tokens(),), {"use_cache": False}, False),
    "llama, training": lambda: (
        llama(2), (_tokens(),), {"use_cache": False, "labels": _tokens()}, True),
    "llama, float16": lambda: (llama(1, torch.float16), (_tokens(),), {"use_cache": False}, False),
    "float32": lambda: (Residual(), (torch.ones(32, 64),), {}, False),
    "GPT-2": lambda: (_gpt2(), (_tokens(),), {"use_cache": False}, False),
    "TransformerEncoderLayer": lambda: (_encoder(), (_rows(),), {}, True),
    "nothing": lambda: (Nothing(), (torch.ones(32, 64),), {}, False),
}  # fmt: skip


@functools.cache
def explained(name):
    """The explanation of a subject with the gate open, and its page."""
    model, args, kwargs, trains = SUBJECTS[name]()
    with torch.set_grad_enabled(trains):
        found = explain(model, *args, options={"gate": "always"}, **kwargs)
    return found, found.html()
