# SPDX-License-Identifier: Apache-2.0
"""A process without kernels, and one with an unknown torch, is told so: once, with the remedy."""

import re
from pathlib import Path

import pytest
import torch
from measured import figures
from processes import python
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo.users import MISH, write

from coda_inductor import backend, notice
from coda_inductor.errors import FallbackError
from coda_inductor.gpu import H100, match_gpu, tables
from coda_inductor.mainloop import availability, environment
from coda_inductor.options import parse
from coda_inductor.pipeline import on_aten
from coda_inductor.record import Record
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
    refusal = None if why is None else refuse("no-kernel-stack", why)
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: refusal)


def compiled(function, x, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend.coda, options=options)(x)


WHY = "quack-kernels is not installed: pip install 'coda-inductor[cuda]'"


def test_a_process_without_kernels_is_told_once(warnings, monkeypatch):
    """Of a product inside of a region, too."""
    stack(monkeypatch, WHY)
    model, x = nn.Linear(8, 8), torch.ones(2, 8, requires_grad=True)
    inside = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    torch.compile(inside, backend=backend.coda, options={"strict": True})(x)
    assert len(warnings()) == 1
    compiled(nn.Linear(16, 16), torch.ones(2, 16), strict=True)
    (said,) = warnings()
    assert said.startswith(f"coda_inductor: no GEMM becomes a kernel here: {WHY}. ")
    assert "options={'reference': True}" in said


@pytest.mark.parametrize("options", [{"reference": True}, {"gate": "never"}, None], ids=str)
def test_who_asked_for_no_kernels_is_told_nothing(options, warnings, monkeypatch):
    """Nor is a graph without products worth a warning."""
    stack(monkeypatch, WHY)
    function = torch.sin if options is None else nn.Linear(8, 8)
    compiled(function, torch.ones(2, 8), **(options or {}))
    assert warnings() == []


def test_a_model_that_was_not_moved_to_the_gpu_is_named(warnings, monkeypatch):
    stack(monkeypatch, None)
    compiled(nn.Linear(8, 8), torch.ones(2, 8))
    (said,) = warnings()
    assert "the model is not on a GPU, but this machine has one: model.cuda()" in said


def test_a_gpu_without_measurements_is_named(monkeypatch, tmp_path):
    """Blackwell: kernels could run, and the default gate has none."""
    stack(monkeypatch, None)
    graph = torch.fx.symbolic_trace(lambda x: x @ x)
    unknown = match_gpu("NVIDIA B200", (10, 0), 148, tables(None))
    monkeypatch.setattr(notice, "gpu_of", lambda device: unknown)
    on_gpu = [torch.nn.Parameter(torch.ones(1))]
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0))
    empty = Measurements(unknown, tmp_path)
    monkeypatch.setattr(notice, "measurements_of", lambda gpu: empty)
    auto = parse(None, None)
    assert notice.no_kernels(graph, on_gpu, auto) == gate.unmeasured(unknown)
    for asks in ({"gate": "always"}, {"tune": "always"}):
        assert notice.no_kernels(graph, on_gpu, parse(None, asks)) is None
    empty.add({"a site": figures({"a config": 1.0})})
    assert notice.no_kernels(graph, on_gpu, auto) is None
    monkeypatch.setattr(notice, "gpu_of", lambda device: H100)
    monkeypatch.setattr(notice, "measurements_of", lambda gpu: Measurements(gpu, tmp_path))
    assert notice.no_kernels(graph, on_gpu, auto) is None


def test_missing_kernels_are_one_warning_not_one_a_site(warnings, monkeypatch):
    """With strict, each is a failure as before; on a GPU, which is what meta stands for."""
    stack(monkeypatch, WHY)
    from coda_inductor.plan import Plan

    monkeypatch.setattr(Plan, "on_kernels", lambda *_: True)
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x: (x @ x).relu(), tracing_mode="fake"
    )(torch.ones(8, 8))
    record = Record(parse(None, None))
    on_aten(graph.graph, record)
    assert [site.reason for site in record.report.sites] == [WHY]
    assert warnings() == []
    with pytest.raises(FallbackError, match="quack-kernels is not installed"):
        on_aten(graph.graph, Record(parse(None, {"strict": True})))


def test_ranges_are_what_pip_is_asked_for_and_the_readme_says():
    text = (ROOT / "pyproject.toml").read_text()
    for needed in (environment.QUACK, environment.CUTEDSL):
        found = re.findall(rf'"{needed.package}(?:\[\w+\])?([<>=][^";]*)', text)
        assert len(found) == 2  # extras cuda and kernels-test
        assert {needed.package + spec for spec in found} == {needed.spec}
    *first, last = environment.TESTED_TORCH
    assert f'"torch>={first[0]}"' in text
    assert f"{', '.join(first)} and {last}" in (ROOT / "README.md").read_text()


#: Threads that compile first register the backend once. No kernel library is imported, also not to
#: write kernels' sources.
FRESH = """
import sys, threading, torch

barrier, errors = threading.Barrier(4), []
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))  # nothing to build in C++

def look_up():
    barrier.wait()
    try:
        torch.compile(m, backend="coda")
    except Exception as error:
        errors.append(repr(error))

threads = [threading.Thread(target=look_up) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(errors)
torch.compile(m, backend="coda")(torch.ones(2, 8))
torch.compile(m[0], backend="coda")(torch.ones(3, 8))
from coda_inductor.codegen.render import render
from programs import kinds
for program in kinds().values():
    render(program)
assert "quack" not in sys.modules
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run here")
def test_a_fresh_process_is_told():
    """End to end, at the default log level, with no setting."""
    done = python("-c", FRESH)
    assert done.stdout == "[]\n"
    assert done.stderr.count("no GEMM becomes a kernel here: no CUDA device") == 1


@pytest.mark.usefixtures("without_code")
def test_what_had_no_effect_is_one_line(warnings, monkeypatch, tmp_path):
    """A pattern that is nowhere, a limit of memory without gradients, a graph that fuses nothing,
    seconds for measurements that are switched off, a disabled name that stops nothing."""
    monkeypatch.undo()
    monkeypatch.setattr(notice, "logged", {"kernels"})
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8)
    options = {"patterns": [write(tmp_path, MISH)], "memory": 0.5}
    options |= {"tune": "never", "tune_seconds": 1.0, "disable": ["swiglu", "gemm:9"]}
    for _ in range(2):
        compiled(model, x, **options)
    said = warnings()
    for part in ("'tune_seconds' has no effect", "mish_glu was found nowhere in the graph:",
                 "'memory' has no effect", "none of the 2 GEMMs of the graph is fused,",
                 "nothing in it is called 'swiglu'", "fuses no GEMM of a module '9'"):  # fmt: skip
        assert sum(part in line for line in said) == 1, said
    monkeypatch.setattr(notice, "logged", {"kernels"})
    compiled(model, x, memory="1 GiB")
    assert any("no gradients on a GPU: a number from 0 to 1 works" in line for line in warnings())
