# SPDX-License-Identifier: Apache-2.0
"""Every version is in the keys of what is kept. tests/test_inductor.py has processes that find it,
or that are of another version."""

import shutil
from pathlib import Path

import torch

from coda_inductor import joint
from coda_inductor.mainloop import availability, environment
from coda_inductor.select import measurements

ROOT = Path(__file__).resolve().parents[1]


def test_each_librarys_version_is_in_the_keys(monkeypatch):
    """Of graphs, and of folders of kernels and measurements, which no other library changes."""
    parts = availability.identity.__wrapped__, environment.label, measurements.versions
    before, version = [part() for part in parts], environment.version
    for library in ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi"):
        for module in (environment, availability):
            changed_one = {library: "9.9"}
            monkeypatch.setattr(module, "version", lambda n, c=changed_one: c.get(n) or version(n))
        changed = [part() != was for part, was in zip(parts, before, strict=True)]
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
