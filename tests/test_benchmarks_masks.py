# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/masks.py`` on the CPU, with small models and without compiling."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import masks

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(masks, "LLAMA", SMALL)
    monkeypatch.setattr(masks, "MISTRAL", SMALL | {"sliding_window": 9})
    monkeypatch.setattr(masks, "DOCUMENTS", (20, 7, 13))
    monkeypatch.setattr(masks, "PADDING", (0, 8))
    monkeypatch.setattr(masks, "ATTENTION", {"attention_padded": (2, 20, 16)})
    names = ("eager", "coda", "coda without block_mask")
    monkeypatch.setattr(masks, "VARIANTS", dict.fromkeys(names, ("eager", None)))


@pytest.mark.parametrize("name", ["packed", "padded", "window", "attention_padded"])
def test_a_part(name, monkeypatch, capsys):
    """It says that it is ready, and then, when told to go on, what it found."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    masks.part(name, 2)
    ready, result = capsys.readouterr().out.splitlines()
    assert ready == "ready"
    found = json.loads(result)
    assert all(variant["median_ms"] > 0 for variant in found.values())
    if name in masks.MODELS:
        assert 0 < found["eager"]["gradient_error"] < 0.1
        assert found["eager"]["loss"] == pytest.approx(found["eager"]["exact_loss"], rel=0.01)


def test_results_say_what_was_measured_and_how(monkeypatch, tmp_path):
    monkeypatch.setattr(masks, "measured", lambda names: {name: {} for name in names})
    masks.main([str(tmp_path / "out.json"), "padded", "window", "--commit", "abc1234"])
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written["results"]) == ["padded", "window"]
    about = written["environment"]
    assert about["commit"] == "abc1234"
    assert about["command"] == "python -m benchmarks.masks out.json padded window"


def test_a_name_that_does_not_exist_is_said(capsys):
    with pytest.raises(SystemExit):
        masks.main(["out.json", "padding"])
    assert "unknown padding; known: packed, padded, window" in capsys.readouterr().err


def test_documents_see_only_themselves():
    q = torch.randn(1, 2, 40, 16)
    data = masks.shown("attention_packed", 40)
    assert data[0].bincount().tolist() == [20, 7, 13]
    whole = masks.attend("attention_packed", q, q, q, data)
    own = masks.attend("attention_packed", *([q[:, :, 20:27]] * 3), data[:, 20:27])
    torch.testing.assert_close(whole[:, :, 20:27], own)
