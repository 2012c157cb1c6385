# SPDX-License-Identifier: Apache-2.0
"""A process without kernels, and one with an unknown torch, is told so: once, with the remedy."""

import re
from pathlib import Path

import pytest
import torch
from measured import figures
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo.users import MISH, write

from coda_inductor import backend, notice
from coda_inductor.gpu import match_gpu, tables
from coda_inductor.mainloop import availability, environment
from coda_inductor.options import parse
from coda_inductor.refusal import refuse
from coda_inductor.select import choice as gate
from coda_inductor.select.measurements import Measurements

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def warnings(monkeypatch, warned):
    """The process has been told nothing yet, and nothing is compiled; gives what it is told."""
    monkeypatch.setattr(notice, "logged", set())
    monkeypatch.setattr(backend, "compile_fx", lambda gm, inputs, **_: gm.forward)
    return warned


def stack(monkeypatch, why):
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: why)


def compiled(function, x, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend.coda, options=options)(x)


WHY = refuse("no-kernel-stack", "quack-kernels is not installed")


def test_a_process_without_kernels_is_told_once(warnings, monkeypatch):
    """Of a product in a region, too; nothing where there is none, or none is asked for."""
    stack(monkeypatch, WHY)
    model, x = nn.Linear(8, 8), torch.ones(2, 8, requires_grad=True)
    compiled(torch.sin, x)
    for options in ({"reference": True}, {"gate": "never"}):
        compiled(model, x, **options)
    assert warnings() == []
    inside = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    torch.compile(inside, backend=backend.coda, options={"strict": True})(x)
    assert len(warnings()) == 1
    compiled(nn.Linear(16, 16), torch.ones(2, 16), strict=True)
    (said,) = warnings()
    assert WHY.text in said


def test_a_gpu_without_measurements_is_named(monkeypatch, tmp_path):
    stack(monkeypatch, None)
    graph = torch.fx.symbolic_trace(lambda x: x @ x)
    unknown = match_gpu("NVIDIA B200", (10, 0), 148, tables(None))
    monkeypatch.setattr(notice, "gpu_of", lambda device: unknown)
    on_gpu = [nn.Parameter(torch.ones(1))]
    assert "model.cuda()" in notice.no_kernels(graph, on_gpu, parse(None, None)).text
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))
    empty = Measurements(unknown, tmp_path)
    monkeypatch.setattr(notice, "measurements_of", lambda gpu: empty)
    assert notice.no_kernels(graph, on_gpu, parse(None, None)) == gate.unmeasured(unknown)
    for asks in ({"gate": "always"}, {"tune": "always"}):
        assert notice.no_kernels(graph, on_gpu, parse(None, asks)) is None
    empty.add({"a site": figures({"a config": 1.0})})
    assert notice.no_kernels(graph, on_gpu, parse(None, None)) is None


def test_ranges_are_what_pip_is_asked_for_and_the_readme_says():
    text = (ROOT / "pyproject.toml").read_text()
    for needed in (environment.QUACK, environment.CUTEDSL):
        found = re.findall(rf'"{needed.package}(?:\[\w+\])?([<>=][^";]*)', text)
        assert len(found) == 2  # extras cuda and kernels-test
        assert {needed.package + spec for spec in found} == {needed.spec}
    *first, last = environment.TESTED_TORCH
    assert f'"torch>={first[0]}"' in text
    assert f"{', '.join(first)} and {last}" in (ROOT / "README.md").read_text()


@pytest.mark.usefixtures("without_code")
def test_what_had_no_effect_is_one_line(warnings, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(notice, "logged", {"kernels"})
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8)
    options = {"patterns": [write(tmp_path, MISH)], "memory": 0.5}
    options |= {"tune": "never", "tune_seconds": 1.0, "disable": ["swiglu", "gemm:9"]}
    for _ in range(2):
        compiled(model, x, **options)
    settings = "'tune_seconds'", "'memory'", "'swiglu'", "'9'"
    for part in (*settings, "mish_glu", "none of the 2 GEMMs"):
        assert sum(part in line for line in warnings()) == 1, part
