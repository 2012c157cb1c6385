# SPDX-License-Identifier: Apache-2.0
"""Reports in files: what is written is read, under names that tell graphs apart, and not without
bound. tests/test_inductor.py has processes that find them."""

import dataclasses
import gzip
import os
from unittest.mock import Mock

import pytest
import torch
from harness import Harness
from torch import nn
from zoo.layers import D, whole

from coda_inductor import warm
from coda_inductor.cache_dir import cache_dirs, folder
from coda_inductor.options import parse
from coda_inductor.record import Record
from coda_inductor.report import MemoryReport, reports

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
    warm._write(folder_of_reports / "a.json.gz", report)
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
    """In a folder that is only read, too."""
    warm._write(path := folder_of_reports / "a.json.gz", RECORD.report)
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
        path = folder_of_reports / f"{number}.json.gz"
        warm._write(path, RECORD.report)
        os.utime(path, (number, number))
    left = {path.name for path in folder_of_reports.iterdir()}
    assert left == {f"{number}.json.gz" for number in range(2, 21)}


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
    for error in (OSError("No space left on device"), TypeError("not JSON")):
        monkeypatch.setattr(warm, "write", Mock(side_effect=error))
        warm.finish("b", done)
        assert warm.write.called
    assert warm._read("b") is None
