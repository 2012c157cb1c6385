# SPDX-License-Identifier: Apache-2.0
"""``make demo`` tells the truth: what is compiled where, what is saved, in 100 columns.
The other examples run."""

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from zoo.float8 import needs_scaled_mm

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402

import coda_inductor  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="one GEMM is below the default gate there")
def test_a_real_run(tmp_path, monkeypatch):
    """The smallest model through the child process, as the demo starts it."""
    monkeypatch.setenv("COLUMNS", "100")
    ours = demo.measure("coda", tmp_path, "--size", "tiny")
    assert ours["seconds"] > 0
    assert 0 < ours["error"] < 0.1 > ours["eager error"] > 0
    assert ours["matched"]["swiglu"] == 1
    (graph,) = ours["graphs"]
    assert "may be fused, and run as plain ops: device cpu" in graph["text"]
    assert "would move" in graph["text"]
    assert max(map(len, graph["text"].splitlines()[:-1])) <= 100
    assert any((tmp_path / "coda").iterdir())  # its caches were empty, and are not the user's
    json.dumps(ours)


#: What fires in each, on a CPU (masks of packed rows stay there).
FIRES = {"finetune": "rms_norm_backward", "finetune_lora": "swiglu", "fp8": "fp8_quantize",
         "image": "epilogue", "packed": "swiglu", "prefill": "rms_norm",
         "pretrain_fsdp2": "cross_entropy"}  # fmt: skip


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("name", FIRES)
def test_each_example_runs_alone_and_prints_no_speed_on_a_cpu(name, capsys, monkeypatch, tmp_path):
    for module, needed in {"finetune_lora": "peft", "fp8": "torchao"}.items():
        if name == module:
            pytest.importorskip(needed)
    if name == "fp8":
        needs_scaled_mm()
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    module = importlib.import_module(name)
    counters["coda"].clear()
    module.main()
    said = capsys.readouterr().out
    assert counters["coda"][FIRES[name]], dict(counters["coda"])
    assert ("no GPU" in said) is not torch.cuda.is_available() is ("peak" in said)
    assert name in ("image", "prefill") or any(tmp_path.iterdir())  # it has saved
    if name == "finetune":
        module.main([])
        assert "was at step" in capsys.readouterr().out
        module.main(["--memory", "0.5", "--checkpoint", "limited.pt"])
        assert any(report.memory for report in coda_inductor.reports())


def test_each_example_is_one_file():
    ours = {path.stem for path in EXAMPLES.glob("*.py")}
    for path in EXAMPLES.glob("*.py"):
        assert not ours & set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
