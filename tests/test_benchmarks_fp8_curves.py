# SPDX-License-Identifier: Apache-2.0
"""Training in FP8 beside bfloat16: the data, a run, the plot."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from benchmarks import fp8_curves as curves


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(curves.VARIANTS, "eager", ("eager", None, False))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(curves, "SHAPE", sizes | heads)
    monkeypatch.setattr(curves, "BATCH", 2)
    monkeypatch.setattr(curves, "LENGTH", 16)
    monkeypatch.setattr(curves, "LEARNING_RATE", 1e-2)


def test_tokens_walk_along_the_chain(small):
    chain = curves.chain(0, 16)
    first, second = curves.batches(chain, 2, 1)
    for tokens in (first, second):
        assert tokens.shape == (2, 16)
        for row in tokens.tolist():
            assert all(b in chain[a] for a, b in itertools.pairwise(row))
    assert not torch.equal(first, second)
    assert torch.equal(first, curves.batches(chain, 2, 1)[0])


def test_a_run_learns_and_begins_anew_with_each_seed(small):
    one, two = curves.train("eager", "rowwise", 2, 30)
    assert curves.final(one) < 0.9 * one[0]
    assert one[0] != two[0]
    (again,) = curves.train("eager", "rowwise", 1, 30)
    assert again == pytest.approx(one, abs=1e-4)


def test_text_and_plot(tmp_path):
    found = {name: [[3.0, 2.5] * 20, [3.1, 2.5] * 20] for name in ("coda, torchao",)}
    assert curves.text(found).endswith("2.7500, 2.8000; mean 2.7750")
    path = tmp_path / "curves.svg"
    curves.plot({"curves": found, "recipe": "rowwise"}, path)
    assert path.stat().st_size > 5000
    assert math.log(curves.SUCCESSORS) < 2.5


def test_a_variant_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "VARIANTS", {"coda, no such": ("coda", None, True)})
    with pytest.raises(RuntimeError, match="no such"):
        curves.measure(tmp_path / "out.json", "rowwise", 1, 1)
    assert not (tmp_path / "out.json").exists()


def test_results_can_be_plotted_from_their_file(tmp_path, monkeypatch):
    results = tmp_path / "results.json"
    named = {"coda, torchao": [[2.0, 1.0]]}
    results.write_text(json.dumps({"curves": named, "recipe": "rowwise"}))
    monkeypatch.setattr("sys.argv", ["fp8_curves", "plot", str(results), str(tmp_path / "p.svg")])
    curves.main()
    assert (tmp_path / "p.svg").exists()
