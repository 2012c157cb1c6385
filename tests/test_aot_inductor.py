# SPDX-License-Identifier: Apache-2.0
"""Programs of AOTInductor's run without Python, and so without our kernels, unless somebody says
that they need not (``enable(aot=True)``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from blocks import Block, D
from checking import leave_custom_ops
from torch._dynamo.utils import counters

import coda_inductor
from coda_inductor import log

ROOT = Path(__file__).resolve().parent.parent
LOAD = """
import sys, torch
if sys.argv[2]:
    import coda_inductor.backend
inputs, want = torch.load(sys.argv[3])
torch.testing.assert_close(torch._inductor.aoti_load_package(sys.argv[1])(inputs), want)
assert bool(sys.argv[2]) == ("coda_inductor" in sys.modules)
"""


def package(folder, **options):
    """The package of a model, compiled with these options; a call of it and its result."""
    counters.clear()
    log.forget_warnings()
    model, x = Block(), torch.randn(3, D)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        with coda_inductor.enabled(**options):
            path = torch._inductor.aoti_compile_and_package(
                program, package_path=str(folder / "model.pt2")
            )
        want = model(x)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), want)
    torch.save((x, want), folder / "call.pt")
    return path


def load(path, folder, ours=""):
    """Run it in another process, with our package or without: its error, or nothing."""
    command = [sys.executable, "-c", LOAD, path, ours, str(folder / "call.pt")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def test_a_program_that_needs_no_python_is_not_fused(tmp_path, monkeypatch, caplog):
    leave_custom_ops(monkeypatch)  # as on a GPU
    path = package(tmp_path)
    report = coda_inductor.reports()[-1]
    assert report.sites
    assert {site.refusal.code for site in report.sites} == {"aot-inductor"}
    assert not counters["coda"]
    (said,) = [r.getMessage() for r in caplog.records if "AOTInductor" in r.getMessage()]
    assert "coda_inductor.enable(aot=True)" in said
    assert load(path, tmp_path) == ""


def test_a_program_that_may_need_python_is(tmp_path, monkeypatch):
    leave_custom_ops(monkeypatch)
    path = package(tmp_path, aot=True)
    assert counters["coda"] == {"rms_norm": 1, "swiglu": 1, "residual": 1}
    assert load(path, tmp_path, "ours") == ""
    assert "coda_inductor::gemm_epilogue" in load(path, tmp_path)
