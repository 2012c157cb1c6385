# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture alone, transformers' module with ``grouped_mm``, for ``headline``: the
shapes of OLMoE, Qwen3-30B-A3B and Mixtral, under routing at random and by Zipf's law."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .worth_models import Workload

#: Name -> tokens, d, f, experts, top_k.
SHAPES = {
    "OLMoE": (8192, 2048, 1024, 64, 8),
    "Qwen3-30B-A3B": (8192, 2048, 768, 128, 8),
    "Qwen3-30B-A3B, 32768 tokens": (32768, 2048, 768, 128, 8),
    "Mixtral": (8192, 4096, 14336, 8, 2),
}


class Experts(Workload):
    """Forward, or forward and backward of x, the router's weights and both parameters."""

    def __init__(self, name: str, training: bool, skewed: bool):
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

        tokens, d, f, experts, top_k = SHAPES[name]
        config = OlmoeConfig(hidden_size=d, intermediate_size=f, num_experts=experts)
        config._experts_implementation = "grouped_mm"
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = OlmoeExperts(config).bfloat16()
            logits = torch.randn(tokens, experts)
            if skewed:  # shares as one over the rank
                logits -= torch.arange(1, experts + 1).log()
            w, ids = torch.topk(logits.softmax(-1), top_k)
            x, self.dy = (torch.randn(tokens, d, dtype=torch.bfloat16) for _ in range(2))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        w = (w / w.sum(-1, keepdim=True)).bfloat16()
        self.given = x.requires_grad_(training), ids, w.requires_grad_(training)
        super().__init__(model, {}, training)

    def _run(self, function: Callable[..., Any]) -> None:
        with torch.set_grad_enabled(self.training):
            y = function(*self.given)
        if self.training:
            y.backward(self.dy)
            for tensor in (*self.model.parameters(), *self.given):
                tensor.grad = None


CASES = {
    f"{name} experts{skew}, {what}": functools.partial(Experts, name, training, bool(skew))
    for name in SHAPES
    for what, training in (("training", True), ("forward", False))
    for skew in ("", ", skewed")
}
