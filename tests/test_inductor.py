# SPDX-License-Identifier: Apache-2.0
"""Through Inductor itself, code generation and caches included: few cases, each takes seconds."""

import json
import shutil
import zipfile
from pathlib import Path

import torch
from checking import leave_custom_ops
from processes import python
from test_backend import UsersPass
from torch._dynamo.utils import counters
from torch._inductor import config
from zoo.layers import D, whole

import coda_inductor
from coda_inductor import pass_mode


def test_inference_on_strided_rows():
    model, x = whole(), torch.randn(3, 2, 2 * D)[..., ::2].transpose(0, 1)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="coda")(x), model(x))
    # The residual stream is not row-major: its norm is left to Inductor.
    assert dict(counters["coda"]) == {"swiglu": 1}


SCRIPT = """
import json, os, pathlib, sys, torch
import torch._inductor.compile_fx
from apart import apart
from contextlib import nullcontext
from dataclasses import replace
from torch._dynamo.utils import counters
from zoo.layers import D, whole
import coda_inductor
from coda_inductor import pipeline
from coda_inductor.backend import coda

def fail(graph, record):
    raise OSError("No space left on device")

def process(whats, folder="one", artifacts="", fault=False):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(folder) + "/inductor"
    os.environ["CODA_CACHE_DIR"] = os.path.abspath(folder) + "/coda"
    kept = artifacts and pathlib.Path(artifacts)
    if kept and kept.exists():
        torch.compiler.load_cache_artifacts(kept.read_bytes())
    if fault:
        pipeline.ON_ATEN = tuple(replace(each, run=fail) for each in pipeline.ON_ATEN)
    for what in whats:
        compile(*what.split("+"))
    if kept and not kept.exists():
        kept.write_bytes(torch.compiler.save_cache_artifacts()[0])

def compile(how, *others):
    print(MARK, file=sys.stderr)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    reports = len(coda_inductor.reports())
    model = torch.nn.Linear(D, D, bias=False) if "small" in others else whole()
    x, mode, chosen = torch.randn(4, D), nullcontext(), {"backend": coda}
    if "enabled" in others:
        mode, chosen = coda_inductor.enabled(), {}
    with torch.set_grad_enabled(how == "train"), mode:
        ours = torch.compile(model, **chosen)(x)
        torch.testing.assert_close(ours, model(x))
        if how == "train":
            ours.sum().backward()
    hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
    new = coda_inductor.reports()[reports:]
    print(json.dumps({
        "hits": hits, "missed": counters["inductor"]["fxgraph_cache_miss"],
        "counters": counters["coda"], "result": ours.tolist(), "version": coda_inductor.__version__,
        "cached": [report.from_cache for report in new],
        "reports": [repr(replace(report, from_cache=False)) for report in new],
    }))

for stage in json.loads(sys.argv[1]):
    apart(process, **stage)
"""
ROOT = Path(coda_inductor.__file__).parents[1]
#: Between what is logged of one compilation and of the next.
MARK = "-- next --"


def in_new_processes(folder: Path, *stages: dict, source: Path = ROOT) -> list[dict]:
    """What SCRIPT finds, and its "log", for each of "whats" ("infer" or "train", and how) of each
    process: ``stages`` are the arguments of ``process`` there. ``source``: of our package."""
    environment = {
        "PYTHONPATH": f"{source}:{ROOT / 'tests'}",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",  # conftest turns both off
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    done = python(
        "-c", SCRIPT.replace("MARK", repr(MARK)), json.dumps(stages), cwd=folder, **environment
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    parts = done.stderr.split(MARK)[1:]
    return [{**one, "log": log} for one, log in zip(found, parts, strict=True)]


WAYS = ("infer", "train+enabled+small")
SMALL = ("train+small",)  # nothing to build in C++


def test_second_process_takes_the_graph_from_torchs_cache(tmp_path):
    """With its report, and what failed once is not kept there. One process fails, one compiles, one
    finds, and one has no cache but artifacts. Then another version of ours runs on the first one's
    folders (pytorch/pytorch 144344: an older one's gradients were read)."""
    found = in_new_processes(
        tmp_path,
        {"whats": WAYS[:1], "fault": True},
        {"whats": WAYS},
        {"whats": WAYS},
        {"whats": SMALL, "artifacts": "kept"},
        {"whats": SMALL, "artifacts": "kept", "folder": "two"},
    )
    failed, first, second, (small, carried) = found[0], found[1:3], found[3:5], found[5:]
    (other,) = in_new_processes(tmp_path, {"whats": SMALL}, source=another_version(tmp_path))
    assert small["result"] == carried["result"] == other["result"]
    kept = [(each["hits"], each["missed"]) for each in (small, carried, other)]
    assert kept == [([0, 0], 2), ([2, 1], 0), ([0, 0], 2)]  # forward and backward
    assert other["version"] == "9.9"
    assert "No space left on device" in failed["log"]
    for compiled, hit in zip(first, second, strict=True):
        assert (compiled["hits"], compiled["cached"]) == ([0, 0], [False])
        assert "No space left" not in compiled["log"] + hit["log"]
        assert (hit["hits"][1], hit["cached"]) == (1, [True])
        assert all(hit[name] == compiled[name] for name in ("result", "reports", "counters"))
    assert second[0]["counters"]["rms_norm"] == 1


def another_version(folder: Path) -> Path:
    for name in ("coda_inductor", "patterns"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "other" / name, ignore=skipped)
    init = folder / "other/coda_inductor/__init__.py"
    init.write_text(init.read_text().replace(coda_inductor.__version__, "9.9"))
    return folder / "other"


def test_a_program_of_aot_inductor_is_not_changed(tmp_path, monkeypatch, warned):
    leave_custom_ops(monkeypatch)  # as on a GPU
    coda_inductor.report.forget()
    passes = {name: UsersPass(name) for name in (pass_mode.DYNAMO, pass_mode.JOINT)}
    # Compiling it, and headers for it, takes seconds.
    text = {"aot_inductor.package_cpp_only": True, "aot_inductor.precompile_headers": False}
    with torch.no_grad(), config.patch(passes), coda_inductor.enabled():
        program = torch.export.export(whole(), (torch.randn(3, D),))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2"), inductor_configs=text
        )
    assert not coda_inductor.reports()
    assert not counters["coda"]
    assert [each.calls for each in passes.values()] == [1, 1]
    assert ["AOTInductor's programs" in said for said in warned()] == [True]
    with zipfile.ZipFile(path) as package:
        texts = [package.read(name) for name in package.namelist() if name.endswith(".cpp")]
    assert texts
    assert not any(b"coda_inductor" in text for text in texts)
