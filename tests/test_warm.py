# SPDX-License-Identifier: Apache-2.0
"""What is kept: every version is in its keys; reports in files are read as they were written, under
names that tell graphs apart, and not without bound. tests/test_inductor.py has processes that find
all that, or that are of another version."""

import dataclasses
import gzip
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from harness import Harness
from torch import nn
from zoo.layers import D, whole

import coda_inductor
from coda_inductor import joint, warm
from coda_inductor.cache_dir import cache_dirs, folder
from coda_inductor.mainloop import availability, environment
from coda_inductor.options import parse
from coda_inductor.record import Record
from coda_inductor.report import MemoryReport, reports
from coda_inductor.select import measurements

RECORD = Record(parse(None, {}))


@pytest.fixture
def folder_of_reports(monkeypatch, tmp_path):
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "coda"))
    return folder(warm.FOLDER)


def test_what_is_written_is_read(folder_of_reports):
    """With programs, reasons, memory and symbolic sizes."""
    harness = Harness(strict=False)
    harness.train(whole(), torch.randn(5, D), dynamic=True).sum().backward()
    report = harness.report
    report.memory = MemoryReport(1, 2, 3, 4.5, 6, 7)
    harness.record.refuse("rms_norm", "norm", report.sites[-1].refusal)
    assert any(site.program for site in report.sites)
    warm._write(folder_of_reports / "a.pickle.gz", report)
    read = warm._read("a")
    assert read.from_cache
    assert read.table().replace("from torch's compile cache, as it was compiled\n", "") == (
        report.table()
    )
    for site in report.sites:
        site.shape = tuple(n if isinstance(n, int) else str(n) for n in site.shape)
    assert any(isinstance(site.shape[0], str) for site in report.sites)
    assert read == report


def test_a_damaged_file_is_no_report(folder_of_reports, monkeypatch):
    warm._write(path := folder_of_reports / "a.pickle.gz", RECORD.report)
    monkeypatch.setattr(warm, "cache_dirs", lambda: (folder_of_reports, cache_dirs()[0]))
    assert warm._read("a") == RECORD.report
    before = len(reports())
    for text in (path.read_bytes()[:99], gzip.compress(b"{}")):
        path.write_bytes(text)
        warm.finish("a", Record(RECORD.options))
    assert len(reports()) == before


def test_files_are_not_kept_without_bound(folder_of_reports, monkeypatch):
    monkeypatch.setattr(warm, "_MOST_FILES", 20)
    for number in range(21):
        path = folder_of_reports / f"{number}.pickle.gz"
        warm._write(path, RECORD.report)
        os.utime(path, (number, number))
    left = {path.name for path in folder_of_reports.iterdir()}
    assert left == {f"{number}.pickle.gz" for number in range(2, 21)}


def test_other_graphs_inputs_options_and_modes_are_other_names():
    def name(model=None, x=None, uuid="1", record=RECORD):
        gm = torch.fx.symbolic_trace(model or nn.Linear(8, 8))
        x = torch.ones(4, 8) if x is None else x
        return warm.key(gm, [x], lambda: uuid, record)

    assert name() is None  # torch caches nothing
    with torch._functorch.config.patch(enable_autograd_cache=True):
        first, x = name(), torch.ones(4, 8)
        assert name() == first
        others = [
            name(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), name(x=x[:2]), name(x=x.double()),
            name(x=torch.ones(8, 4).T), name(x=torch.ones(4, 8, requires_grad=True)), name(x=4),
            name(uuid="2"), name(record=Record(parse(None, {"tune": "always"}))),
        ]  # fmt: skip
        with torch.no_grad():
            others.append(name())
        with torch.autocast("cpu"):
            others.append(name())
        assert len({first, *others}) == len(others) + 1
        assert name(uuid=None) is None
        assert warm.key(nn.Linear(8, 8), [], lambda: "1", RECORD) is None  # it has no graph


def test_only_what_is_new_is_counted_and_what_failed_is_not_kept(folder_of_reports, monkeypatch):
    """The passes on Dynamo's graph have run and counted, in a process that finds the rest."""
    done = Record(RECORD.options, rewritten=True)
    done.report.fired.update(swiglu=2, residual=1)
    warm.finish("a", done)
    torch._dynamo.utils.counters["coda"]["swiglu"] = 2
    found = Record(RECORD.options)
    found.report.fired.update(swiglu=2)
    warm.finish("a", found)
    assert torch._dynamo.utils.counters["coda"] == {"swiglu": 2, "residual": 1}
    warm.finish("b", dataclasses.replace(done, failed=True))
    for error in (OSError("No space left on device"), TypeError("cannot pickle")):
        monkeypatch.setattr(warm, "write", Mock(side_effect=error))
        warm.finish("b", done)
        assert warm.write.called
    assert warm._read("b") is None


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
    shutil.copytree(Path(coda_inductor.__file__).parent, tmp_path / "coda_inductor")
    monkeypatch.setattr(joint, "__file__", str(tmp_path / "coda_inductor" / "joint.py"))
    before = joint._sources.__wrapped__()
    for name in ("__init__.py", "select/tables/nvidia_h200.json", "codegen/render.py"):
        path = tmp_path / "coda_inductor" / name
        text = path.read_text()
        path.write_text(text + " ")
        assert joint._sources.__wrapped__() != before, name
        path.write_text(text)
    assert joint._sources.__wrapped__() == before
