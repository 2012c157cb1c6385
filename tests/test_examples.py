# SPDX-License-Identifier: Apache-2.0
"""``make demo`` tells what was matched, and errors, in 100 columns. The other examples run."""

import functools
import importlib
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from harness import as_it_is
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from zoo.float8 import needs_scaled_mm

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402

import coda_inductor  # noqa: E402


@pytest.mark.usefixtures("without_code")
@pytest.mark.skipif(torch.cuda.is_available(), reason="one GEMM is below the default gate there")
def test_a_real_run(monkeypatch, capsys):
    light = functools.partial(compile_fx.compile_fx, inner_compile=as_it_is)
    monkeypatch.setattr(compile_fx, "compile_fx", light)  # nor of torch.compile's
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(demo, "LENGTH", 16)
    monkeypatch.setattr(demo, "SIZES", (64, 128, 2, 1, 256, 1))
    coda_inductor.report.forget()
    demo.main()
    said = capsys.readouterr().out
    assert "1 x swiglu" in said
    assert max(map(len, said.splitlines())) <= 100
    errors = dict(re.findall(r"(\S+) +(\S+e-\d+)$", said, re.MULTILINE))
    assert all(0 < float(errors[name]) < 0.1 for name in ("eager", "torch.compile", "coda"))


#: What fires in each, on a CPU.
FIRES = {"finetune": "rms_norm_backward", "image": "epilogue", "pretrain_fsdp2": "cross_entropy",
         "lora_fp8": "fp8_linear"}  # fmt: skip


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("name", FIRES)
def test_each_example_runs_alone_and_prints_no_speed_on_a_cpu(name, capsys, monkeypatch, tmp_path):
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
    assert name == "image" or any(tmp_path.iterdir())  # it has saved
    if name == "finetune":
        module.main([])
        assert "was at step" in capsys.readouterr().out


@pytest.mark.usefixtures("without_code")
def test_the_loop_trains_in_other_ways(monkeypatch, tmp_path):
    """All of them at once. Adapters are also those of ``lora_fp8.py``."""
    pytest.importorskip("torchao")
    needs_scaled_mm()
    monkeypatch.chdir(tmp_path)
    counters["coda"].clear()
    coda_inductor.report.forget()
    importlib.import_module("finetune").main(["--fp8", "rowwise", "--packed", "--memory", "0.5"])
    assert counters["coda"]["fp8_quantize"], dict(counters["coda"])
    assert any(report.memory for report in coda_inductor.reports())
