# SPDX-License-Identifier: Apache-2.0
"""The lists of blocks as FlexAttention's kernels find them in what Inductor compiles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import randn
from torch._dynamo.utils import counters
from torch._inductor import config, lowering
from torch._inductor.kernel.flex.common import freeze_irnodes, maybe_realize

from coda_inductor.dynamo.attention import block_masks

T = 256
aten, higher_order = torch.ops.aten, torch.ops.higher_order


@pytest.fixture(autouse=True)
def compiled_here(monkeypatch):
    """Scalar code builds faster; nothing comes from a cache."""
    monkeypatch.setattr(block_masks, "DEVICE", "cpu")
    monkeypatch.setattr(block_masks, "DTYPES", (torch.float32,))
    with config.patch({"cpp.simdlen": 0, "force_disable_caches": True}):
        yield


@pytest.fixture
def read(monkeypatch):
    """(direction, name of a list) -> (sizes, strides) of what kernels would be given. Nothing
    runs: there are no kernels for the CPU's gradients."""
    found = {}

    def note(direction, block_mask):
        parts = maybe_realize(list(block_mask[2:10]))
        freeze_irnodes(parts)
        names = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
                 "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"]  # fmt: skip
        for name, part in zip(names, parts, strict=True):
            found[direction, name] = tuple(
                tuple(map(int, numbers)) for numbers in (part.get_size(), part.get_stride())
            )

    def copy(tensor):
        return lowering.lowerings[aten.clone](tensor)

    def forward(query, key, value, score_mod, block_mask, *_):
        note("forward", block_mask)
        rows = lowering.lowerings[aten.select](query, 3, 0)
        return copy(query), copy(rows), copy(rows)

    def backward(query, key, value, *rest):  # out, lse, their gradients, two graphs, block mask
        note("backward", rest[6])
        return copy(query), copy(key), copy(value), ()

    monkeypatch.setitem(lowering.lowerings, higher_order.flex_attention, forward)
    monkeypatch.setitem(lowering.lowerings, higher_order.flex_attention_backward, backward)
    return found


def test_kernels_find_each_mask_of_a_batch(read):
    """A kernel takes the lists of batch ``z`` from ``z * stride(1)``, though dimension 1, the
    heads', has the size 1. A regression: it was 0, so that all read the blocks of the first."""
    batch = 3
    seen = torch.ones(T, T, dtype=torch.bool).tril() & (torch.rand(batch, 1, 1, T) > 0.5)
    tensors = [randn(batch, 2, T, 16, dtype=torch.float32).requires_grad_() for _ in range(3)]
    options = {"gate": "always", "strict": True}
    attend = torch.compile(F.scaled_dot_product_attention, backend="coda", options=options)
    attend(*tensors, attn_mask=seen).sum().backward()
    assert counters["coda"]["block_mask"] == 1
    assert len(read) == 16
    for where, (sizes, strides) in read.items():
        assert sizes[:2] == (batch, 1), where
        assert strides == torch.empty(sizes).stride(), where
