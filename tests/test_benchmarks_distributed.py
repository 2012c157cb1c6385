# SPDX-License-Identifier: Apache-2.0
"""The suite of several GPUs, with two processes on a CPU: that it runs, not how fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmark_runs import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import distributed_run, wrapped


def run(tmp_path, *arguments: str) -> dict:
    own = ["--out", str(tmp_path), "--sizes", "tiny", "--tokens", "16", "--ranks", "2"]
    distributed_run.main([*own, "--rounds", "2", *arguments])
    return json.loads((tmp_path / "results.json").read_text())


@pytest.mark.parametrize("way", ["tensor"])
def test_a_way_is_measured_on_all_ranks(way, tmp_path, capsys):
    results = run(tmp_path, "--ways", way, "--variants", "eager")
    assert results["environment"]["ranks"] == 2
    found = results["distributed"][f"{way} tiny 16"]
    assert found["errors"] == {}
    eager = found["variants"]["eager"]
    assert len(eager["samples_ms"]) == 2
    assert eager["median_ms"] > 0
    first, *_, last = found["losses"]["eager"]
    assert last < first  # it learns its batch
    assert found["profile"]["eager"]["total_us"] > 0
    assert f"{way} tiny 16" in capsys.readouterr().out


def test_what_takes_too_long_costs_its_case(tmp_path):
    """No rank is left behind."""
    arguments = ("--ways", "tensor", "--variants", "eager", "--tokens", "24", "--timeout", "4")
    results = run(tmp_path, *arguments)
    (found,) = results["distributed"].values()
    assert found["errors"]["all"] == "not done after 4 s"
    assert (tmp_path / "log.txt").read_text().startswith("== tensor tiny 24")
    assert not [text for text in map(_command, Path("/proc").glob("[0-9]*")) if JOB in text]


#: A job of that test's: others may run beside it.
JOB = "benchmarks.distributed_job\x00tensor\x00tiny\x0024\x00"


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:  # it has ended meanwhile
        return ""


def test_a_way_that_is_none_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "--ways", "zero")
    assert f"'zero' is none of {', '.join(wrapped.WAYS)}" in capsys.readouterr().err
