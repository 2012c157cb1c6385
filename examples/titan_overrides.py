# SPDX-License-Identifier: Apache-2.0
"""torchtitan 0.3 with coda: its blocks, and its head and loss as one graph.

torchtitan takes no backend but Inductor for FlexAttention, so this module adds coda's passes to
Inductor. Its own loss runs in chunks of the tokens, the head in eager. Here head and loss are one
graph in training, with logits in bfloat16. Evaluation and tensor parallelism keep the chunks.

    PYTHONPATH=examples torchrun --nproc-per-node 4 -m torchtitan.train \
        --module llama3 --config llama3_8b --compile.enable \
        --override.imports titan_overrides.head_and_loss
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config.override import derive, override

import coda_inductor

coda_inductor.enable()


class HeadAndLoss(ChunkedLossWrapper):
    """The loss of a trainer whose model returns what its head would multiply."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """The same fields."""

    def __init__(self, config: Config, *, compile_config: Any = None):
        super().__init__(config, compile_config=compile_config)
        self.plain = config.loss_fn.build(compile_config=None)

    def set_lm_head(self, lm_head: nn.Module) -> None:
        super().set_lm_head(lm_head)
        multiply, plain = lm_head.forward, self.plain
        self.fused = torch.compile(lambda hidden, labels: plain(multiply(hidden), labels)[0])

    def __call__(self, pred: Tensor, labels: Tensor, tokens: Any = None, **given: Any) -> Any:
        if isinstance(self.lm_head, FSDPModule):
            self.lm_head.unshard()
        weight, rows = self.lm_head.weight, self.lm_head.out_features
        shared = any(isinstance(t, DTensor) for t in (weight, pred)) or len(weight) < rows
        if shared or not pred.requires_grad:
            return super().__call__(pred, labels, tokens, **given)
        loss = self.fused(pred, labels)
        return (loss if tokens is None else loss / tokens), {}


@override(target=ChunkedLossWrapper.Config, exact=True, description="head and loss in one graph")
def head_and_loss(config: ChunkedLossWrapper.Config) -> HeadAndLoss.Config:
    """What ``--override.imports`` names."""
    return derive(config, HeadAndLoss.Config)
