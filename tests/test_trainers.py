# SPDX-License-Identifier: Apache-2.0
"""TRL's own trainers, small ones of the benchmark, train under the callback as without it, in one
graph for each use of the model."""

import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("trl")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `benchmarks` is not installed

from benchmarks import models, trainers

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
         "num_key_value_heads": 2, "vocab_size": trainers.WORDS}  # fmt: skip
STEPS = 3


@pytest.mark.parametrize(("case", "graphs"), [("dpo_lora", 2), ("grpo", 1)])
@pytest.mark.usefixtures("without_code")
def test_trainers_of_trl(case, graphs, monkeypatch):
    monkeypatch.setitem(models.OTHERS, trainers.CASES[case][1], ("", SMALL))
    for name, value in (("ROWS", 8), ("LENGTH", 32)):
        monkeypatch.setattr(trainers, name, value)
    monkeypatch.setattr(trainers.curve, "text", lambda: (torch.arange(2, 2 + STEPS * 8 * 32),))
    found = []
    for backend in ("eager", "coda"):
        torch._dynamo.reset()
        counters.clear()
        trainer = trainers.trainer_of(case, backend, 1, STEPS)
        trainer.train()
        found.append([[log[key] for key in ("loss", "grad_norm")]
                      for log in trainer.state.log_history[:STEPS]])  # fmt: skip
    torch.testing.assert_close(*found, rtol=0.02, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == graphs
