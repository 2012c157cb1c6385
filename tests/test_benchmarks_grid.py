# SPDX-License-Identifier: Apache-2.0
"""Suites `grid` and `families` measure and render, at a size for CPUs, and survive a process that
dies.

The grid runs once through the real command line; the death of a process is tested with scripts in
place of one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import queue
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmark_runs import benchmarks

from benchmarks import (
    cases,
    compile_parts,
    contest,
    families,
    grid_job,
    grid_run,
    grid_tables,
    plots,
    ratio_plot,
)
from benchmarks.cases import Case, Way
from coda_inductor.runtime import client

pytestmark = pytest.mark.timeout(300)

NAMES = ["tiny-32-forward-bf16", "tiny-32-training-bf16"]
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results"
DEAD = "the process died while preparing it"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of the grid: the folder of its files and what it printed."""
    out = tmp_path_factory.mktemp("benchmarks_grid") / "out"
    arguments = ["--cases", NAMES[1], "--jobs", "0", "--seconds", "0.01"]
    done = benchmarks("grid", "--out", str(out), *arguments, forking=True, op_by_op=True)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.fixture(scope="module")
def results(run):
    return json.loads((run[0] / "results.json").read_text())


def test_both_are_measured_and_agree(results):
    assert list(results["grid"]) == [NAMES[1]]
    result = results["grid"][NAMES[1]]
    assert result["errors"] == {}
    assert list(result["variants"]) == ["compile", "coda"]
    assert all(len(v["samples_ms"]) >= 11 for v in result["variants"].values())
    assert 0 <= result["difference"]["coda"] < 0.02
    assert result["shape"] == {"M": 32, "d": 64, "f": 128, "kv": 32, "norm": "hf"}


def test_what_ours_says_of_the_graphs_stands_beside_the_times(run, results):
    said = results["grid"][NAMES[1]]["decisions"]["coda"]
    assert said["gemms"] > 10
    assert said["report"]
    assert f"grid {NAMES[1]}: coda, " in (run[0] / "profiles.txt").read_text()
    assert f"grid {NAMES[1]}: compile " in run[1]


def test_the_page_has_every_case_in_its_table_and_a_plot(run, results, tmp_path):
    plots.write([run[0] / "results.json"], tmp_path)
    page = (tmp_path / "benchmarks.md").read_text()
    assert "(benchmarks_grid.svg)" in page
    row = next(line for line in page.splitlines() if f" {NAMES[1]} |" in line)
    assert f"{results['grid'][NAMES[1]]['variants']['coda']['median_ms']:.3f}" in row
    assert "<svg" in (tmp_path / "benchmarks_grid.svg").read_text()


def test_an_unknown_case_is_refused(tmp_path, capsys):
    for pattern in ("9B-32-forward-bf16", "8B-512-sideways-bf16", "nothing*"):
        with pytest.raises(SystemExit):
            grid_run.main("grid", ["--out", str(tmp_path), "--cases", pattern])
        assert f"--cases: {pattern!r} matches no case" in capsys.readouterr().err


def test_cases_are_chosen_by_pattern_or_named():
    suite = contest.SUITES["grid"]
    names = [case.name for case in suite.every()]
    assert len(names) == len(set(names)) == 70
    found = cases.chosen(["8B-512-*", "64/128/32-8-training-fp16"], suite.every(), suite.check)
    assert [case.name for case in found] == [
        "8B-512-forward-bf16",
        "8B-512-training-bf16",
        "64/128/32-8-training-fp16",
    ]
    assert len(families.every()) == 2 * 15


# Processes


@pytest.fixture
def inductor_config():
    """Torch's own way to put a setting back: a monkeypatch leaves it missing for later tests."""
    with torch._inductor.config.patch(autotune_local_cache=True):
        yield torch._inductor.config


def test_a_worker_compiles_ahead_and_goes_on_after_a_failure(
    monkeypatch, tmp_path, capsys, inductor_config
):
    done = []

    def prepare(suite, case, way):
        done.append((suite, case.name, way.backend))
        if case.rows == 1:
            raise RuntimeError("no kernel")
        return {"gemms": 7, "fused": 5, "report": ""}

    monkeypatch.setattr(contest, "prepare", prepare)
    work: queue.SimpleQueue = queue.SimpleQueue()
    for name in ("4/4/4-1-forward-bf16", "4/4/4-2-forward-bf16"):
        work.put((name, "coda"))
    work.put(None)
    grid_job._worker(work, "grid", tmp_path, {"coda": Way("coda")})
    assert [name for _, name, _ in done] == ["4/4/4-1-forward-bf16", "4/4/4-2-forward-bf16"]
    assert "RuntimeError: no kernel" in capsys.readouterr().err
    (note,) = tmp_path.glob("*.json")
    assert json.loads(note.read_text())[:2] == ["4/4/4-2-forward-bf16", "coda"]
    assert inductor_config.autotune_local_cache is False


PROCESS = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
order = json.loads((folder / "order.json").read_text())

def begin(case, variant=""):
    (folder / "case").write_text(case)
    (folder / "progress").write_text(variant)

def finish(case):
    result = {"variants": {}, "errors": order["skip"].get(case, {}), "profile": {}, "decisions": {},
              "energy": {}, "accuracy": {}, "shape": {}, "seconds": 1.0}
    with (folder / "result.json").open("a") as stream:
        stream.write(json.dumps([case, result]) + chr(10))
"""


def measured(monkeypatch, tmp_path, source: str, seconds: float = 60.0) -> tuple[dict, list]:
    """The results of both NAMES where the measuring process runs `source`, and the environments
    of those processes."""
    started = []

    def start(folder, log, variables):
        started.append(variables)
        command = [sys.executable, "-c", PROCESS + source, str(folder)]
        return subprocess.Popen(command, stderr=log, start_new_session=True)

    monkeypatch.setattr(grid_run, "_start", start)
    options = argparse.Namespace(
        cases=NAMES,
        options=None,
        caches=None,
        commit="c",
        max_autotune=[],
        out=tmp_path,
        seconds=0.1,
        energy=0.0,
        jobs=0,
        late=[],
        cold=[],
        variants=["*"],
    )
    one = grid_run.Run("grid", options, [], time.monotonic() + seconds, tmp_path)
    one.measure({NAMES[0]: {"coda": {"gemms": 7, "fused": 5, "report": ""}}})
    assert json.loads((tmp_path / "results.json").read_text())["grid"] == one.results["grid"]
    return one.results["grid"], started


def test_a_process_that_dies_goes_on_without_the_variant(monkeypatch, tmp_path):
    found, started = measured(
        monkeypatch,
        tmp_path,
        """
for case, _ in order["cases"]:
    begin(case, "coda")
    if "training" in case and not order["skip"].get(case):
        os._exit(7)
    finish(case)
""",
    )
    assert len(started) == 2
    assert found[NAMES[0]]["errors"] == {}
    assert found[NAMES[0]]["decisions"]["coda"]["fused"] == 5  # what was said when it was compiled
    assert found[NAMES[1]]["errors"] == {"coda": DEAD}
    folders = {name: text for name, text in started[0].items() if name.endswith("_CACHE_DIR")}
    assert {str(tmp_path / "caches" / name.lower()) for name in folders} == set(folders.values())
    assert {name: started[1][name] for name in folders} == folders


def test_a_process_that_dies_between_variants_costs_its_case(monkeypatch, tmp_path):
    found, started = measured(
        monkeypatch,
        tmp_path,
        """
for case, _ in order["cases"]:
    begin(case)
    if "forward" in case:
        os._exit(7)
    finish(case)
""",
    )
    assert len(started) == 2
    assert found[NAMES[0]] == {"error": "the process died while measuring it"}
    assert "variants" in found[NAMES[1]]


def test_a_process_that_dies_outside_a_case_is_not_started_for_ever(monkeypatch, tmp_path):
    found, started = measured(monkeypatch, tmp_path, "os._exit(7)\n")
    assert len(started) == 1
    why = "the process died outside a case; its log says why"
    assert found == {name: {"error": why} for name in NAMES}


def test_a_process_that_hangs_is_killed_and_the_rest_had_no_time(monkeypatch, tmp_path):
    monkeypatch.setattr(grid_run, "GRACE_S", 0.2)
    source = "begin(order['cases'][0][0]); finish(order['cases'][0][0]); time.sleep(100)\n"
    found, started = measured(monkeypatch, tmp_path, source, seconds=1.0)
    assert len(started) == 1
    assert "variants" in found[NAMES[0]]
    assert found[NAMES[1]] == {"error": "no time was left"}


# Tables and plots


def entry(**samples: list[float]) -> dict:
    """A result with these samples, in ms."""
    variants = {
        name: {"median_ms": sorted(times)[len(times) // 2], "samples_ms": times}
        for name, times in samples.items()
    }
    return {"variants": variants, "errors": {}, "energy": {}, "decisions": {}}


def test_a_ratio_is_over_the_faster_mode_of_torch_compile():
    fast = [1.8, 2.0, 2.2]
    one = entry(compile=[3.0] * 3, max_autotune=fast, coda=[1.0] * 3, compile_causal=[1.5] * 3)
    results = {"grid": {"8B-512-forward-bf16": one, "8B-512-training-bf16": {"error": "x"}}}
    assert grid_tables.speedups(results, "grid", "coda", "forward") == {"8B-512-forward-bf16": 2.0}
    assert grid_tables.speedups(results, "grid", "coda", "training") == {}
    assert grid_tables.spread(one) == (1.8, 2.2)
    table = grid_tables.together(results, "grid")
    assert "2.000 (8B-512-forward-bf16)" in table
    assert "1.500" in grid_tables.cases(results, "grid")  # over is_causal


def test_slower_cases_are_counted():
    results = {
        "grid": {
            f"8B-{rows}-forward-bf16": entry(compile=[1.0], coda=[1 / speed])
            for rows, speed in ((512, 0.9), (1000, 0.995), (4096, 1.2))
        }
    }
    row = grid_tables.together(results, "grid", "tsv").splitlines()[1].split("\t")
    assert [cell.strip() for cell in row][2:7] == [
        "3", "1.024", "0.900 (8B-512-forward-bf16)", "1.200", "1",
    ]  # fmt: skip


def test_what_gemms_alone_would_take_is_of_the_committed_profiles():
    """The figures of README and docs/gotchas.md."""
    results = json.loads((RESULTS / "h200_grid.json").read_text())
    rows = grid_tables.ceilings(results, "grid", "tsv").splitlines()[1:]
    cells = [[cell.strip() for cell in row.split("\t")][:4] for row in rows]
    assert cells == [["forward", "35", "", "1.071"], ["training", "35", "at most", "1.075"]]


def test_a_kernel_that_the_profile_leaves_out_may_be_a_gemm():
    kernels = [("nvjet_sm90_TNT", 60.0), ("void cublasLt::splitKreduce_kernel<32>", 15.0)]
    profile = {"total_us": 100.0, "kernels": [{"name": n, "us": us} for n, us in kernels]}
    result = {"variants": {}, "profile": {"compile": profile}}
    assert grid_tables.ceiling(result) == (pytest.approx(100 / 75), False)
    profile["kernels"].append({"name": "triton_poi_fused_mul_silu_1", "us": 25.0})
    assert grid_tables.ceiling(result) == (pytest.approx(100 / 75), True)
    profile["kernels"] = profile["kernels"][2:]
    assert grid_tables.ceiling(result) is None
    assert grid_tables.ceilings({"grid": {"8B-512-forward-bf16": result}}, "grid") == ""


def test_the_plot_groups_by_size_in_order_of_rows():
    names = ["8B-512-forward-bf16", "1B-4096-forward-fp16", "1B-512-forward-bf16"]
    places = ratio_plot._places([Case.parse(name) for name in [*names, names[0]]])
    order = [("8B", 512, "bf16"), ("1B", 512, "bf16"), ("1B", 4096, "fp16")]
    assert list(places) == order
    eight, one, half = places.values()
    assert half - one == pytest.approx(1)
    assert one - eight > half - one


def test_the_plot_has_a_point_a_case_and_the_mean(tmp_path):
    results = {
        "families": {
            case.name: entry(compile=[1.0], compile_causal=[0.9], coda=[0.8])
            for case in families.every()
        }
    }
    assert ratio_plot.write(results, "families", tmp_path / "f.svg")
    picture = (tmp_path / "f.svg").read_text()
    for title in families.FAMILIES.values():
        assert picture.count(f"<!-- {title} -->") == 2  # once a panel
    assert picture.count("<!-- coda: geometric mean 1.250 of 15 -->") == 2
    assert not ratio_plot.write({"families": {}}, "families", tmp_path / "none.svg")


# Families


def graphs_of(work: families.Model, way: dict) -> tuple[list, list]:
    """What a compiled call returns, and the calls of SDPA in its graphs."""
    calls = []

    def backend(gm, _inputs):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls.extend(node for node in gm.graph.nodes if node.target is sdpa)
        return gm

    with torch.set_grad_enabled(work.training):
        return work.compiled(Way(backend, **way))(), calls


@pytest.mark.parametrize("mode", ["forward", "training"])
def test_the_causal_variant_computes_the_same_without_a_mask(mode):
    work = families.Model(Case("tiny", 16, mode))
    values, calls = graphs_of(work, {})
    others, causal = graphs_of(work, {"causal": True})
    assert len(calls) == len(causal) == 1  # layer
    assert all(call.kwargs["attn_mask"] is not None for call in calls)
    assert all(call.kwargs["attn_mask"] is None for call in causal)
    assert all(call.kwargs["is_causal"] for call in causal)
    assert work.difference(others, values) < 0.02
    assert work.difference([2 * value for value in values], values) == pytest.approx(1.0)
    if mode == "training":
        assert len(values) == len(list(work.model.parameters()))
        assert all(weight.grad is None for weight in work.model.parameters())
    else:
        assert values[0].shape == (1, 1, 256)  # the last position


@pytest.mark.parametrize("mode", ["forward", "training"])
def test_errors_are_of_all_results_against_fp32(mode):
    work = families.Model(Case("tiny", 16, mode))
    with torch.set_grad_enabled(work.training):
        call = work.compiled(Way("eager"))
        found = work.errors({"compile": call, "coda": lambda: [0.0 * t for t in call()]})
    assert 0 < found["compile"]["all"] < 0.02
    assert found["coda"]["all"] == pytest.approx(1.0)
    results = {"families": {"x": entry(compile=[1.0], coda=[1.0]) | {"accuracy": found}}}
    heads, row = grid_tables.cases(results, "families", "tsv").splitlines()[:2]
    assert "error, coda" in heads
    assert row.split("\t")[-1].strip() == "1.00e+00"


def test_a_family_with_a_decoder_gets_its_input(monkeypatch):
    kind, each, shape = families.models.OTHERS["t5"]
    small = {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    monkeypatch.setitem(families.models.OTHERS, "t5", (kind, each, {**shape, **small}))
    work = families.Model(Case("t5", 16, "forward"))
    with torch.no_grad():
        (logits,) = work.compiled(Way("eager"))()
    assert logits.shape == (1, 16, 64)
    assert "compile_causal" not in families.variants(Case("t5", 16, "forward"))


# Where the time of a first call goes


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """What time it is by ``clock.now``, in seconds."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(compile_parts, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_a_part_within_another_is_not_counted_twice(clock):
    def passes(seconds: float) -> None:
        clock.now += seconds

    watch = compile_parts.Stopwatch()
    inner = watch.timed("inner", lambda: passes(5.0))

    def work(depth: int) -> None:
        passes(2.0)
        inner()
        if depth:
            outer(depth - 1)

    outer = watch.timed("outer", work)
    outer(1)
    assert watch.calls == {"outer": 2, "inner": 2}
    assert watch.whole["inner"] == watch.seconds["inner"] == 10.0
    assert watch.seconds["outer"] == 4.0
    assert watch.whole["outer"] == 14.0


def test_kernels_have_the_times_of_their_server(monkeypatch, clock):
    monkeypatch.setattr(client.Server, "__init__", lambda *_: None)
    futures: list[concurrent.futures.Future] = []

    def submit(*_):
        futures.append(concurrent.futures.Future())
        return futures[-1]

    monkeypatch.setattr(client.Server, "submit", submit)
    kernels = compile_parts.Kernels(0.0)
    clock.now = 1.0
    client.Server("90").submit({})
    clock.now = 3.0
    for future in futures:
        future.set_result(None)
    assert list(kernels.jobs) == [(1.0, 3.0)]
    assert list(kernels.ready) == [3.0]
