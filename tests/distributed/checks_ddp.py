# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: each way to compile, what it keeps of the fusions, what it leaves."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from pathlib import Path

import torch
from decoder import (
    OPTIONS,
    assert_trained_as,
    batches,
    decoder,
    fired,
    fresh,
    full,
    heard,
    mine,
    single,
    train,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import coda_inductor
from coda_inductor.runtime import notice

#: A block has more parameters than a bucket of 1 MiB holds, so that torch cuts within blocks.
LAYERS, WIDTH = 2, 128
HOW = {"backend": "coda", "options": OPTIONS}


def trained() -> None:
    """Steps of the two ranks, which must be those of one rank with all data; then nothing keeps the
    model or what DDP has made of it, which would end later than its group, or not at all."""
    fresh()
    model, data = decoder(LAYERS, WIDTH), batches(2, 2)
    step = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), **HOW)
    train(model, list(map(mine, data)), step)
    assert_trained_as(model, single(data, LAYERS, WIDTH))
    kept = [weakref.ref(x) for x in (model, step, model.head.weight)]
    del model, step
    gc.collect()
    assert not any(reference() for reference in kept)


def check_a_graph_that_ddp_cut_is_named_once_with_the_remedy():
    notice.told.discard("ddp")
    with heard() as said:
        trained()
    (warning,) = said
    assert "DistributedDataParallel cut" in warning
    assert "optimize_ddp = False" in warning
    assert "block.compile(backend='coda')" in warning
    assert len(coda_inductor.reports()) > 1
    assert fired().get("rms_norm", 0) < 2 * LAYERS  # as many as one graph would have


def check_the_pages_recipes_train_as_eager_does():
    """docs/distributed.md, word for word, with a Llama; nothing of DDP or torch stays changed."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    recipes = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    how = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=1, num_key_value_heads=4, **how)
    tokens = torch.arange(16).reshape(2, 8)
    eager = LlamaForCausalLM(config).double()
    weights = copy.deepcopy(eager.state_dict())
    eager(tokens, labels=tokens).loss.backward()
    notice.told.discard("ddp")
    for recipe in recipes:
        fresh()
        model = LlamaForCausalLM(config).double()
        model.load_state_dict(weights)
        names = {"model": model}
        with torch._dynamo.config.patch(optimize_ddp=True), heard() as said:
            exec(recipe, names)  # noqa: S102 (it is our page)
            names["model"](tokens, labels=tokens).loss.backward()
        have = fired()
        assert have.get("swiglu") == have.get("swiglu_backward") == 1, (recipe, have)
        assert not [text for text in said if "cut" in text]
        for got, want in zip(model.parameters(), eager.parameters(), strict=True):
            # The loss of transformers is computed in float32.
            torch.testing.assert_close(full(got.grad), want.grad, rtol=1e-5, atol=1e-7)
    assert len(recipes) == 3
