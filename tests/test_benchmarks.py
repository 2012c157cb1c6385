# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run from the command line, and shipped tables are made of committed results."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed

from benchmarks import __main__, curve, sweep, whole  # noqa: E402
from coda_inductor.select.device import H100  # noqa: E402

RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize("name", __main__.COMMANDS)
def test_each_command_has_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize(("sources", "table"), [
    (["h100_sweep", "h100_experts_sites", "h100_paper_sites"], "nvidia_h100_80gb_hbm3.json"),
    (
        [
            "h200_sweep",
            "h200_heads_sites",
            "h200_sites_loaded",
            "h200_experts_sites",
            "h200_dit_sites",
        ],
        "nvidia_h200.json",
    ),
])  # fmt: skip
def test_the_shipped_tables_are_made_of_what_is_committed(sources, table, tmp_path):
    shipped, made = H100.sites.parent / table, tmp_path / table
    made.write_text(shipped.read_text())
    sweep.ship([RESULTS / f"{name}.json" for name in sources], made)
    assert json.loads(made.read_text()) == json.loads(shipped.read_text())


@pytest.fixture
def learned(monkeypatch, tmp_path):
    """What a tiny run of ten steps has found."""
    monkeypatch.setenv("CODA_TUNE", "never")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
             "num_attention_heads": 4}  # fmt: skip
    monkeypatch.setattr(curve, "SHAPE", curve.SHAPE | small | {"vocab_size": 512})
    monkeypatch.setattr(curve, "EXPERTS", {"num_experts": 4, "num_experts_per_tok": 2})
    for name, value in {"ROWS": 2, "LENGTH": 32, "HELD": 1}.items():
        monkeypatch.setattr(curve, name, value)
    tokens = torch.arange(600, dtype=torch.int16) % 7
    monkeypatch.setattr(curve, "text", lambda: (tokens, tokens))

    def run(name):
        kept = []
        curve.train(name, 10, kept.append, tmp_path / "base.pt")
        return kept[-1][name]

    return run


def test_adapters_of_all_seeds_start_from_the_same_weights(learned):
    pytest.importorskip("peft")
    one, other = (learned(f"lora {run}") for run in ("compile", "compile 1"))
    assert one["held_out"]["0"] == other["held_out"]["0"]
    assert one["losses"] != other["losses"]
    assert one["held_out"]["0"] > one["held_out"]["10"] > 0


def test_a_whole_model_takes_a_step_and_counts_what_is_frozen(capsys):
    pytest.importorskip("peft")
    workload, flops = whole.built("tiny lora coda 2x32 adamw")
    workload.optimizer = whole.optimizer_of("adamw", workload.model)
    before = {n: p.clone() for n, p in workload.model.named_parameters()}
    workload.step((), "coda")()
    for name, now in workload.model.named_parameters():
        assert torch.equal(now, before[name]) == ("lora_B" not in name)
    _, full = whole.built("tiny bf16 coda 2x32")
    adapters = sum(p.numel() for p in workload.model.parameters() if p.requires_grad)
    attention = 6 * 64 * 32
    assert flops - attention - 6 * adapters == (full - attention) * 4 / 6
    with pytest.raises(SystemExit):
        whole.main(["unused.json", "--variant", "8B lorra coda"])
    assert "'lorra' is none of 8B, " in capsys.readouterr().err
