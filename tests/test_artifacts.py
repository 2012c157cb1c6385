# SPDX-License-Identifier: Apache-2.0
"""Warm starts: torch's cache artifacts carry a compiled model between processes, every version is
in the keys, and two versions that share folders do not read each other's entries."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import python

from coda_inductor import joint
from coda_inductor.mainloop import availability, environment
from coda_inductor.select import measurements

ROOT = Path(__file__).resolve().parents[1]
#: A step in a fork for each cache folder, with artifacts in it or, if there are none, into it.
STEP = """
import json, os, pathlib, sys, torch
import torch._inductor.compile_fx
from apart import apart
from torch._dynamo.utils import counters

import coda_inductor


def step(folder, artifacts):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder + "/inductor"
    os.environ["CODA_CACHE_DIR"] = folder + "/coda"
    if artifacts.exists():
        torch.compiler.load_cache_artifacts(artifacts.read_bytes())
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 8, bias=False), torch.randn(4, 8)  # no C++ of its own to build
    y = torch.compile(model, backend="coda")(x)
    y.backward(torch.ones_like(y))
    if not artifacts.exists():
        artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
    of = counters["inductor"]
    print(json.dumps([coda_inductor.__version__, of["fxgraph_cache_hit"], of["fxgraph_cache_miss"],
                      counters["aot_autograd"]["autograd_cache_hit"], y.sum().item()]))


for folder in sys.argv[2:]:
    apart(step, folder, pathlib.Path(sys.argv[1]))
"""


def test_artifacts_are_found_and_another_version_is_not(tmp_path):
    """The first process saves them, another one has no cache beside them. Then another version of
    ours runs on the first one's folders (pytorch/pytorch 144344: an older one's gradients were
    read)."""
    other = tmp_path / "other"
    for name in ("coda_inductor", "patterns"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, other / name, ignore=skipped)
    init = other / "coda_inductor" / "__init__.py"
    (line,) = [x for x in init.read_text().splitlines() if x.startswith("__version__")]
    init.write_text(init.read_text().replace(line, '__version__ = "9.9"'))

    def steps(artifacts, *folders, source=ROOT):
        environment = {
            "PYTHONPATH": f"{source}:{ROOT / 'tests'}",
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        }
        folders = [tmp_path / folder for folder in folders]
        done = python("-c", STEP, tmp_path / artifacts, *folders, cwd=tmp_path, **environment)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]

    (version, *first, loss), second = steps("artifacts", "one", "two")
    assert first == [0, 2, 0]  # forward and backward
    assert second == [version, 2, 0, 1, loss]
    assert steps("others", "one", source=other) == [["9.9", 0, 2, 0, loss]]


@pytest.mark.parametrize("library", ["quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi"])
def test_each_librarys_version_is_in_the_keys(library, monkeypatch):
    """Of graphs, and of folders of kernels and measurements, which no other library changes."""
    before = availability.identity.__wrapped__(), environment.label(), measurements.versions()
    version = environment.version
    for module in (environment, availability):
        monkeypatch.setattr(module, "version", lambda n: "9.9" if n == library else version(n))
    after = availability.identity.__wrapped__(), environment.label(), measurements.versions()
    changed = [was != now for was, now in zip(before, after, strict=True)]
    assert changed == [True, *[library != "apache-tvm-ffi"] * 2]


def test_torch_its_cuda_and_the_gpu_are_in_the_keys(monkeypatch):
    identity, versions = availability.identity.__wrapped__(), measurements.versions()
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA B9")
    monkeypatch.setattr(availability, "kernel_stack", lambda _: None)
    other = availability.identity.__wrapped__()
    assert set(other) - set(identity) == {"torch 9.9", "gpu NVIDIA B9: runs"}
    assert "cuda99.9" in measurements.versions() != versions


def test_our_sources_and_tables_are_in_the_keys(monkeypatch, tmp_path):
    shutil.copytree(ROOT / "coda_inductor", tmp_path / "coda_inductor")
    monkeypatch.setattr(joint, "__file__", str(tmp_path / "coda_inductor" / "joint.py"))
    before = joint._sources.__wrapped__()
    for name in ("__init__.py", "select/tables/nvidia_h200.json", "codegen/render.py"):
        path = tmp_path / "coda_inductor" / name
        text = path.read_text()
        path.write_text(text + " ")
        assert joint._sources.__wrapped__() != before, name
        path.write_text(text)
    assert joint._sources.__wrapped__() == before
