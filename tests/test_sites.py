# SPDX-License-Identifier: Apache-2.0
"""The sites of a graph: each GEMM is analyzed once, and again only where a pass changed it."""

from collections import Counter

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from coda_inductor import sites as table
from coda_inductor.explanation import explain
from coda_inductor.fuse import pair
from coda_inductor.lowering import driver
from coda_inductor.select import legality
from coda_inductor.select.site import Site

LAYERS = 2


@pytest.fixture
def counts(monkeypatch):
    """How often a site is begun, its legality is evaluated, and a region is grown."""
    counted: Counter[str] = Counter()

    def count(name, home, attribute):
        function = getattr(home, attribute)

        def counting(*args, **kwargs):
            counted[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(home, attribute, counting)

    count("begun", Site, "of")
    count("legality", legality, "unsupported")
    for home in (driver, pair, table):
        count("regions", home, "grow")
    return counted


def test_each_gemm_of_a_training_graph_is_analyzed_once(counts):
    """Llama 3 8B's widths. Of a GEMM whose operands a pass replaced, legality is asked again."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, tokens = LlamaForCausalLM(config).bfloat16(), torch.zeros(1, 8192, dtype=torch.long)
    sites = explain(lambda: model(tokens, labels=tokens).loss, gpu="h200").sites
    gemms = sum(1 + site.site.count(" + ") for site in sites)
    grown = sum(not site.idle for site in sites)
    assert gemms >= 21 * LAYERS
    assert counts["begun"] <= 1.25 * gemms
    # The program of a region is another question to the kernels than a bare product.
    assert counts["legality"] <= counts["begun"] + counts["regions"]
    assert counts["regions"] <= 1.3 * grown


def test_what_only_the_caller_reads_is_not_grown(counts):
    with torch.device("meta"):
        first, last = nn.Linear(4096, 4096).bfloat16(), nn.Linear(4096, 4096).bfloat16()
        x = torch.zeros(8192, 4096, dtype=torch.bfloat16)
    with torch.no_grad():
        sites = explain(lambda: last(first(x).relu()), gpu="h200").sites
    assert [site.how for site in sites] == ["kernel", "unfused"]
    assert "it is an output of the graph" in sites[1].reason
    assert counts["regions"] == 1
