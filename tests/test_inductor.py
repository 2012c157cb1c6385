# SPDX-License-Identifier: Apache-2.0
"""Through Inductor itself, code generation and caches included: few cases, each takes seconds."""

import json
import logging
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
from coda_inductor import pass_mode, warm


def test_inference_through_the_entry_point():
    model, x = whole(), torch.randn(2, 3, D)
    compiled = torch.compile(model, backend="coda", mode="default")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        # Other strides are another graph; the values are eager's.
        strided = torch.randn(3, 2, 2 * D)[..., ::2].transpose(0, 1)
        torch.testing.assert_close(compiled(strided), model(strided))
        expanded = torch.randn(1, 1, D).expand(2, 3, D)
        torch.testing.assert_close(compiled(expanded), model(expanded))
    # The residual stream of the transposed input is not row-major: its norm is left to Inductor.
    assert dict(counters["coda"]) == {"rms_norm": 2, "swiglu": 3, "residual": 2}


SCRIPT = """
import json, logging, os, pathlib, sys, torch
import torch._inductor.compile_fx
from apart import apart
from contextlib import nullcontext
from dataclasses import replace
from torch._dynamo.utils import counters
from zoo.layers import D, whole
import coda_inductor
from coda_inductor import pipeline
from coda_inductor.backend import coda
from coda_inductor.cache_dir import cache_dir
from coda_inductor.warm import FOLDER

def fail():
    def fuse_gemms(graph, record):
        raise OSError("No space left on device")

    pipeline.ON_ATEN = tuple(
        replace(each, run=fuse_gemms) if each.name == "fuse" else each for each in pipeline.ON_ATEN
    )

def process(whats, folder="one", artifacts="", level=None, fault=False, damage=False):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(folder) + "/inductor"
    os.environ["CODA_CACHE_DIR"] = os.path.abspath(folder) + "/coda"
    kept = artifacts and pathlib.Path(artifacts)
    if kept and kept.exists():
        torch.compiler.load_cache_artifacts(kept.read_bytes())
    if level:
        torch._logging.set_logs(modules={"coda_inductor": level})
    if fault:
        fail()
    if damage:
        gone, cut = (cache_dir() / FOLDER).iterdir()
        gone.unlink()
        cut.write_bytes(cut.read_bytes()[:99])
    for what in whats:
        compile(*what.split(" ", 1))
    if kept and not kept.exists():
        kept.write_bytes(torch.compiler.save_cache_artifacts()[0])

def compile(how, options):
    print(MARK, file=sys.stderr)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    reports = len(coda_inductor.reports())
    how, *others = how.split("+")
    model = torch.nn.Linear(D, D, bias=False) if "small" in others else whole()
    x, enabled = torch.randn(4, D), "enabled" in others
    mode = coda_inductor.enabled() if enabled else nullcontext()
    chosen = {} if enabled else {"backend": coda, "options": json.loads(options)}
    with torch.set_grad_enabled(how == "train"), mode:
        ours = torch.compile(model, **chosen)(x)
        torch.testing.assert_close(ours, model(x))
        if how == "train":
            ours.sum().backward()
    hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
    version, missed = coda_inductor.__version__, counters["inductor"]["fxgraph_cache_miss"]
    new = coda_inductor.reports()[reports:]
    print(json.dumps({
        "hits": hits, "counters": counters["coda"], "result": ours.tolist(),
        "version": version, "missed": missed,
        "cached": [report.from_cache for report in new], "tables": [r.table() for r in new],
        "reports": [repr(replace(report, from_cache=False)) for report in new],
    }))

for stage in json.loads(sys.argv[1]):
    apart(process, **stage)
"""
ROOT = Path(coda_inductor.__file__).parents[1]
#: What a table says below the GEMMs.
CACHED = "\nfrom torch's compile cache, as it was compiled"
#: Between what is logged of one compilation and of the next.
MARK = "-- next --"


def in_new_processes(folder: Path, *stages: dict, source: Path = ROOT) -> list[dict]:
    """What SCRIPT finds, and its "log", for each of "whats" ("infer" or "train", and options) of
    each process: ``stages`` are the arguments of ``process`` there. ``source``: of our package."""
    environment = {
        "PYTHONPATH": f"{source}:{ROOT / 'tests'}",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",  # conftest turns both off
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCH_LOGS": "+coda_inductor",
    }
    script = SCRIPT.replace("MARK", repr(MARK))
    done = python("-c", script, json.dumps(stages), cwd=folder, **environment)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    parts = done.stderr.split(MARK)[1:]
    return [{**one, "log": log} for one, log in zip(found, parts, strict=True)]


WAYS = ("infer {}", "train+enabled {}")
SMALL = ("train+small {}",)  # nothing to build in C++


def test_second_process_takes_the_graph_from_torchs_cache(tmp_path):
    """With its report, and what failed once is not kept there. One process fails, one compiles, one
    finds, one finds reports that are missing or damaged, and one has no cache but artifacts. Then
    another version of ours runs on the first one's folders (pytorch/pytorch 144344: an older one's
    gradients were read)."""
    found = in_new_processes(
        tmp_path,
        {"whats": WAYS[:1], "level": logging.INFO, "fault": True},
        {"whats": WAYS, "level": logging.INFO},
        {"whats": WAYS},
        {"whats": WAYS, "damage": True},
        {"whats": SMALL, "artifacts": "kept"},
        {"whats": SMALL, "artifacts": "kept", "folder": "two"},
    )
    failed, first, second, damaged = found[0], found[1:3], found[3:5], found[5:7]
    small, carried = found[7:]
    (other,) = in_new_processes(tmp_path, {"whats": SMALL}, source=another_version(tmp_path))
    assert small["result"] == carried["result"] == other["result"]
    kept = [(each["hits"], each["missed"]) for each in (small, carried, other)]
    assert kept == [([0, 0], 2), ([2, 1], 0), ([0, 0], 2)]  # forward and backward
    assert [each["version"] for each in (small, carried, other)] == [
        coda_inductor.__version__, coda_inductor.__version__, "9.9",
    ]  # fmt: skip
    assert "No space left on device" in failed["log"]
    for compiled in first:
        assert (compiled["hits"], compiled["cached"]) == ([0, 0], [False])
        assert "No space left" not in compiled["log"]
        had = torch.tensor(failed["result"])
        torch.testing.assert_close(torch.tensor(compiled["result"]), had)
    log = first[0]["log"]
    assert "GEMMs may be fused, and run as plain ops: device cpu has no kernels" in log
    assert "no GEMM becomes a kernel here" in log
    for compiled, hit in zip(first, second, strict=True):
        assert (hit["hits"][1], hit["cached"]) == (1, [True])
        assert all(hit[name] == compiled[name] for name in ("result", "reports", "counters"))
        assert hit["counters"]["rms_norm"] == 1
        assert "No space left" not in hit["log"]
        assert "from torch's compile cache" in hit["tables"][0]
        assert hit["tables"][0].replace(CACHED, "") == compiled["tables"][0]
    assert second[0]["hits"] == [1, 1]
    log = second[0]["log"]
    assert "graph, from torch's compile cache: 2 of 2 GEMMs may be fused" in log
    assert "no GEMM becomes a kernel here" in log  # a warm cache hides nothing
    files = [*(tmp_path / "one/coda" / warm.FOLDER).iterdir()]
    assert max(file.stat().st_size for file in files) < 4096
    for hit in damaged:
        assert (hit["hits"][1], hit["cached"]) == (1, [])
        assert "from torch's compile cache, neither counted nor reported" in hit["log"]


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
    text = {"aot_inductor.package_cpp_only": True}  # compiling it takes seconds
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
