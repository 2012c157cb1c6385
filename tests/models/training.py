# SPDX-License-Identifier: Apache-2.0
"""Training steps of a decoder, shared by the tests of contexts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from decoders import VOCABULARY
from torch import nn
from torch.utils.checkpoint import checkpoint


def counts(layers: int) -> dict[str, int]:
    """What fires: every norm but the first, whose input is an embedding, and every gate."""
    norms = {"rms_norm": 2 * layers, "rms_norm_backward": 2 * layers}
    return {**norms, "swiglu": layers, "swiglu_backward": layers}


def fired(harness: Any) -> dict[str, int]:
    """The counters of ``counts``, as they were."""
    return {name: harness.counts[name] for name in counts(1)}


def tokens(batch: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(ours: Any, eagers: Any, tolerance: float) -> None:
    """Relative to each tensor's norm; both are dicts of tensors."""
    assert ours.keys() == eagers.keys()
    for name, want in eagers.items():
        error = (ours[name].double() - want.double()).norm() / want.double().norm()
        assert error <= tolerance, f"{name}: {error}"


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def not_reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)
