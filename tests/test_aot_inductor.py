# SPDX-License-Identifier: Apache-2.0
"""Programs of AOTInductor's run without Python, and so without our kernels, unless somebody says
that they need not (``enable(aot=True)``, which ``test_frameworks`` does)."""

from __future__ import annotations

import torch
from blocks import Block, D
from checking import leave_custom_ops
from processes import python
from torch._dynamo.utils import counters

import coda_inductor

LOAD = """
import sys, torch
if sys.argv[2]:
    import coda_inductor.backend
inputs, want = torch.load(sys.argv[3])
torch.testing.assert_close(torch._inductor.aoti_load_package(sys.argv[1])(inputs), want)
assert bool(sys.argv[2]) == ("coda_inductor" in sys.modules)
"""


def load(path, x, want, folder, ours=""):
    """Run it in another process, with our package or without: its error, or nothing."""
    torch.save((x, want), folder / "call.pt")
    done = python("-c", LOAD, path, ours, folder / "call.pt", check=False)
    return done.stderr if done.returncode else ""


def test_a_program_that_needs_no_python_is_not_fused(tmp_path, monkeypatch, warned):
    leave_custom_ops(monkeypatch)  # as on a GPU
    counters.clear()
    model, x = Block(), torch.randn(3, D)
    with torch.no_grad(), coda_inductor.enabled():
        program = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        want = model(x)
    report = coda_inductor.reports()[-1]
    assert report.sites
    assert {site.refusal.code for site in report.sites} == {"aot-inductor"}
    assert not counters["coda"]
    (said,) = [text for text in warned() if "AOTInductor" in text]
    assert "coda_inductor.enable(aot=True)" in said
    assert load(path, x, want, tmp_path) == ""
