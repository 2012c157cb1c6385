# SPDX-License-Identifier: Apache-2.0
"""The benchmark suite measures and renders, at a size for CPUs, and survives bad variants.

The suites run through the real command line, jobs in processes of their own; only the runner's
answers to a process that dies or hangs are tested with scripts in place of a benchmark.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

import pytest
import torch
from benchmark_runs import HAND_LAYER, ROOT, benchmarks

from benchmarks import (
    __main__,
    ceiling,
    environment,
    layer,
    measure,
    plots,
    report,
    runner,
    tables,
)
from benchmarks.runner import Job

pytestmark = pytest.mark.timeout(900)  # the first test waits for all suites

TINY = (
    "--suite layer,llama --sizes tiny --rows 32 --llama tiny --tokens 16 --rounds 2 --timeout 900"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of the suites without gradients: the folder of its files and what it printed."""
    out = tmp_path_factory.mktemp("benchmarks") / "out"
    done = benchmarks("--out", str(out), *TINY.split(), forking=True)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.fixture(scope="module")
def results(run):
    return json.loads((run[0] / "results.json").read_text())


@pytest.mark.parametrize(
    ("suite", "part", "names"),
    [
        ("layer", "tiny", ["eager", "gemms", "gemms_fused", "compile", "max_autotune", "coda"]),
        ("llama", "16", ["eager", "compile", "coda"]),
    ],
)
def test_every_variant_that_exists_on_a_cpu_has_a_median(results, suite, part, names):
    result = results[suite][part]
    assert result["errors"] == {}
    assert list(result["variants"]) == names
    for variant in result["variants"].values():
        assert len(variant["samples_ms"]) == 2
        assert 0 < variant["p20_ms"] <= variant["median_ms"] <= variant["p80_ms"]


def test_errors_against_fp32_stand_beside_those_of_torch_compile(results):
    for suite, part, outputs in [("layer", "tiny", "x2 q k v"), ("llama", "16", "logits")]:
        accuracy = results[suite][part]["accuracy"]
        for name in ("compile", "coda"):
            assert list(accuracy[name]) == outputs.split()
            assert all(0 < error < 0.05 for error in accuracy[name].values())


def test_compile_times_are_cold_then_warm_for_both_backends(results):
    assert list(results["compile"]) == ["inductor", "coda"]
    for runs in results["compile"].values():
        assert 0 < runs["warm"]["first_call_s"] < runs["cold"]["first_call_s"]


def test_a_run_says_what_coda_did_and_where_the_time_went(run, results):
    layer = results["layer"]["tiny"]
    assert sum(layer["counters"].values()) > 0
    assert layer["reports"]
    assert layer["profile"]["coda"]["kernels"]
    assert "layer tiny: coda's report" in (run[0] / "profiles.txt").read_text()


def test_results_name_versions_but_no_local_path(run, results):
    assert results["environment"]["versions"]["torch"]
    assert results["environment"]["command"] == f"python -m benchmarks --out out {TINY}"
    text = (run[0] / "results.json").read_text()
    assert str(run[0].parent) not in text
    assert str(ROOT) not in text


def test_the_table_is_printed_last(run, results):
    assert run[1].endswith(report.short(results) + "\n")
    assert f"{results['layer']['tiny']['variants']['coda']['median_ms']:.3f}" in run[1]


def test_report_renders_page_and_plots_the_same_each_time(run, results, tmp_path):
    """In this process as by the command line."""
    done = benchmarks("report", str(run[0] / "results.json"), "--docs", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    plots.write([run[0] / "results.json"], tmp_path / "two")
    page = (tmp_path / "one" / "benchmarks.md").read_text()
    for suite, part in [("layer", "tiny"), ("llama", "16")]:
        assert f"{results[suite][part]['variants']['coda']['median_ms']:.3f}" in page
        image = f"benchmarks_{suite}.svg"
        assert f"({image})" in page
        assert (tmp_path / "one" / image).read_text() == (tmp_path / "two" / image).read_text()


def test_unknown_size_is_refused_with_the_known_ones(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.measure(["--out", str(tmp_path), "--sizes", "1B,9B"])
    assert "unknown 9B; known: tiny, 1B, 3B, 8B, 13B, 32B, 70B" in capsys.readouterr().err


def test_a_variant_that_raises_leaves_its_error_and_the_others(tmp_path):
    def broken():
        raise RuntimeError("no kernel for this shape")

    variants = measure.Variants(tmp_path / "progress")
    variants.add("bad", broken)
    variants.add("good", lambda: lambda: torch.ones(4).sum())
    result = variants.measure(rounds=2)
    assert result["errors"] == {"bad": "RuntimeError: no kernel for this shape"}
    assert list(result["variants"]) == ["good"]


def test_a_variant_to_be_skipped_is_not_prepared_and_says_why(tmp_path):
    variants = measure.Variants(tmp_path / "progress", {"slow": "left out", "other": "left out"})
    variants.add("slow", lambda: pytest.fail("prepared"))
    assert variants.errors == {"slow": "left out"}


@pytest.mark.parametrize("seconds", [0.2, -1.0])
def test_a_variant_that_is_not_ready_in_time_leaves_the_others_theirs(tmp_path, seconds):
    def slow():
        for _ in range(100):
            with contextlib.suppress(Exception):  # as a compiler does that tries kernels
                time.sleep(0.05)
        pytest.fail("went on")

    variants = measure.Variants(tmp_path / "progress")
    variants.add("good", lambda: lambda: torch.ones(4).sum())
    variants.deadline = time.monotonic() + seconds
    variants.add("slow", slow)
    result = variants.measure(rounds=2)
    assert list(result["variants"]) == ["good"]
    assert result["errors"].keys() == {"slow"}
    assert result["errors"]["slow"].startswith("OutOfTimeError: no")


def test_what_a_variant_needs_first_is_done_before_each_call():
    log = []
    calls = {"a": lambda: log.append("a"), "b": lambda: log.append("b")}
    before = {"b": lambda: log.append("before b")}
    samples = measure.interleaved(calls, rounds=2, warmup=1, before=before, queue_ms=1.0)
    assert {name: len(times) for name, times in samples.items()} == {"a": 2, "b": 2}
    assert log == ["a", "before b", "b", "a", "before b", "b", "before b", "b", "a"]


@torch.no_grad()
def test_the_ceiling_computes_our_layer_with_our_weights(tmp_path):
    path = tmp_path / "hand_layer.py"
    path.write_text(HAND_LAYER)
    block, x0, y = layer.build("tiny", 32, "hf")
    block, x0, y = block.cpu().float(), x0.cpu().float(), y.cpu().float()
    outputs = ceiling.make(path, block, x0, y)()
    for value, truth in zip(outputs, layer.reference(block, x0, y), strict=True):
        torch.testing.assert_close(value, truth[0])


@torch.no_grad()
def test_both_spellings_of_the_norm_give_one_layer():
    (block, x0, y), (other, _, _) = (layer.build("tiny", 32, norm) for norm in ("hf", "torch"))
    other.load_state_dict(block.state_dict())
    pairs = zip(layer.reference(block, x0, y), layer.reference(other, x0, y), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def scripted(monkeypatch, source: str) -> None:
    """Let jobs run `source` instead of a suite, with their `folder` and `job` in scope."""
    prelude = (
        "import json, os, pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[-1])\n"
        "job = json.loads((folder / 'order.json').read_text())\n"
    )
    start = runner.subprocess.Popen

    def popen(command, **options):
        return start([sys.executable, "-c", prelude + source, command[-1]], **options)

    monkeypatch.setattr(runner.subprocess, "Popen", popen)


def test_a_job_runs_in_a_process_of_its_own(tmp_path):
    others = ("gemms", "gemms_fused", "compile", "max_autotune", "coda")
    job = Job("layer", "tiny", 32, rounds=1, skip=dict.fromkeys(others, "not needed"))
    result = runner.run(job, tmp_path / "log", timeout_s=120)
    assert list(result["variants"]) == ["eager"]
    assert result["errors"] == job.skip


def test_a_process_that_dies_is_run_again_without_the_culprit(monkeypatch, tmp_path):
    source = (
        "if 'coda' not in job['skip']:\n"
        "    (folder / 'progress').write_text('coda')\n"
        "    print('illegal memory access', flush=True)\n"
        "    os._exit(7)\n"
        "(folder / 'result.json').write_text(json.dumps(job['skip']))\n"
    )
    scripted(monkeypatch, source)
    result = runner.run(Job("layer", "tiny", 32), tmp_path / "log", timeout_s=60)
    assert result == {"coda": "exit status 7: illegal memory access"}


def test_a_process_that_dies_outside_a_variant_leaves_an_error(monkeypatch, tmp_path):
    scripted(monkeypatch, "raise ValueError('bad order')\n")
    result = runner.run(Job("layer", "tiny", 32), tmp_path / "log", timeout_s=60)
    assert result == {"error": "exit status 1: ValueError: bad order"}


def test_a_process_that_hangs_is_killed(monkeypatch, tmp_path):
    scripted(monkeypatch, "time.sleep(600)\n")
    result = runner.run(Job("layer", "tiny", 32), tmp_path / "log", timeout_s=1)
    assert result["error"].startswith("killed after 1 s")


def test_parts_without_figures_are_named_in_the_tables():
    results = {"layer": {"8B": {"error": "killed after 240 s: "}}}
    assert "NOT MEASURED layer 8B: killed after 240 s" in report.short(results)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"File {ROOT}/coda_inductor/log.py, line 3", "File coda_inductor/log.py, line 3"),
        ("cannot open /some/where/else.so: x", "cannot open else.so: x"),
        ("https://host/a/b and 3/4/5", "https://host/a/b and 3/4/5"),
    ],
)
def test_scrub_removes_paths_only(text, clean):
    assert environment.scrub(text) == clean


def test_runs_of_one_machine_merge_and_of_two_do_not():
    machine = {"gpu": "H100", "driver": "1", "versions": {}, "commit": "c", "date": "d"}
    first = {"environment": {**machine, "command": "one"}, "layer": {"1B": {"error": "x"}}}
    second = {"environment": {**machine, "command": "two"}, "layer": {"8B": {"error": "y"}}}
    merged = report.merged([first, second])
    assert merged["environment"]["command"] == "one; two"
    assert merged["environment"]["commit"] == "c"
    assert list(merged["layer"]) == ["1B", "8B"]
    second["environment"]["gpu"] = "H200"
    with pytest.raises(ValueError, match="differ in gpu"):
        report.merged([first, second])


def test_runs_of_other_versions_do_not_merge_but_may_lack_a_package():
    machine = {"gpu": None, "driver": None, "commit": "c", "date": "d", "command": "x"}
    versions = {"torch": "2.11", "liger-kernel": None, "coda-inductor": "0.1"}
    first = {"environment": {**machine, "versions": versions}}
    second = {"environment": {**machine, "versions": {"torch": "2.11", "liger-kernel": "0.8"}}}
    found = report.merged([first, second])["environment"]["versions"]
    assert found == {"torch": "2.11", "liger-kernel": "0.8", "coda-inductor": "0.1"}
    second["environment"]["versions"]["torch"] = "2.13"
    with pytest.raises(ValueError, match=r"versions of torch \(2.11 and 2.13\)"):
        report.merged([first, second])


def test_speedup_is_over_the_faster_baseline_and_needs_one():
    times = {"compile": 3.0, "max_autotune": 2.0, "coda": 1.0}
    result = {"variants": {name: {"median_ms": time} for name, time in times.items()}}
    assert tables.speedup(result, "coda", ("compile", "max_autotune")) == 2.0
    assert tables.speedup(result, "coda", ("absent",)) is None
    assert tables.speedup(result, "absent", ("compile",)) is None
