# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run from the command line, and shipped tables are made of committed results."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed

import coda_inductor  # noqa: E402
from benchmarks import __main__, sweep, whole  # noqa: E402
from coda_inductor.gpu import H100  # noqa: E402
from coda_inductor.optim import Updated  # noqa: E402

RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize("name", __main__.COMMANDS)
def test_each_command_has_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


#: Table -> the results that it is made of.
TABLES = {
    "nvidia_h100_80gb_hbm3": "h100_sweep h100_experts_sites h100_paper_sites",
    "nvidia_h200": "h200_sweep h200_heads_sites h200_sites_loaded h200_experts_sites "
    "h200_dit_sites h200_dit_fp8_sites h200_hunyuan_sites h200_sd3_fp8_sites",
}


@pytest.mark.parametrize("name", TABLES)
def test_the_shipped_tables_are_made_of_what_is_committed(name, tmp_path):
    shipped, made = H100.sites.parent / f"{name}.json", tmp_path / f"{name}.json"
    made.write_text(shipped.read_text())
    sweep.ship([RESULTS / f"{source}.json" for source in TABLES[name].split()], made)
    assert json.loads(made.read_text()) == json.loads(shipped.read_text())


@pytest.mark.usefixtures("without_code")
def test_a_whole_model_is_updated_within_its_backward_pass_but_for_what_is_frozen():
    pytest.importorskip("peft")
    variant = "tiny lora coda 2x32 adamw in_backward memory=0.5"
    workload, _ = whole.built(variant)
    workload.optimizer = whole.optimizer_of(whole.parsed(variant), workload.model)
    before = {n: p.clone() for n, p in workload.model.named_parameters()}
    taken = []
    workload.optimizer.register_step_pre_hook(
        lambda *_: taken.extend(
            type(p.grad) for p in workload.model.parameters() if p.requires_grad
        )
    )
    workload.step((), "coda")()
    assert {*taken} == {Updated}
    assert coda_inductor.reports()[-1].memory
    for name, now in workload.model.named_parameters():
        assert torch.equal(now, before[name]) == ("lora_B" not in name)
