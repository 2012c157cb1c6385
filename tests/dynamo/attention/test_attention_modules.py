# SPDX-License-Identifier: Apache-2.0
"""torch's own modules, of which attention is not seen: the report says so of their masks."""

from __future__ import annotations

import pytest
import torch
from checking import check_gradients, randn, reasons
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True).double()

    def forward(self, x, padding):
        return self.layer(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("padding", [torch.arange(9) >= torch.tensor([[9], [4]]), None])
def test_their_masks_stay(padding):
    harness = check_gradients(Encoder(), randn(2, 9, 32).requires_grad_(), padding, gate="always")
    assert not harness.counts["block_mask"]
    assert ("nn.MultiheadAttention is one call" in reasons(harness)) == (padding is not None)
