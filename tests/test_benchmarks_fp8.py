# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of FP8 run and write what they say, at sizes for CPUs."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from benchmark_runs import benchmarks  # noqa: F401 (it finds the package)

from benchmarks import (
    contest,
    environment,
    fp8,
    fp8_casts,
    fp8_tables,
    grid_run,
    plots,
    report,
)
from benchmarks.cases import FORWARD, RECIPES, TRAINING, Case, Way
from benchmarks.runner import Files

LAYER, LLAMA = (Case(f"{what}:tiny", 32, TRAINING) for what in ("layer", "llama"))
EFFORT = contest.Effort(seconds=0.01, energy_s=0)

# Casts


def test_casts_are_timed_beside_inductors(tmp_path, capsys, monkeypatch):
    ahead = functools.partial(torch.compile, backend="aot_eager")  # C++ takes 2 s a function
    monkeypatch.setattr(fp8_casts, "compiled", ahead)
    out = tmp_path / "casts.json"
    fp8_casts.main([str(out)], [(33, 48)], 3)
    written = json.loads(out.read_text())
    assert written["environment"]["versions"]["torch"] == torch.__version__
    found = written["results"]["33 x 48"]
    assert list(found) == ["cast", "cast row", "amax", "rowwise", "tensorwise"]
    for variants in found.values():
        assert list(variants) == ["ours", "inductor"]
        assert all(figures["us"] > 0 for figures in variants.values())
    assert capsys.readouterr().out.count("GB/s") == 2 * len(found)


def test_bytes_are_by_the_median():
    figures = fp8_casts.figures([0.001, 0.002, 0.009], 4_000_000)
    assert figures == {"us": 2.0, "p20_us": 1.0, "p80_us": 9.0, "gb_per_s": 2000.0}


def test_both_variants_compute_the_same():
    x = torch.randn(40, 72).bfloat16()
    for ours, theirs in (
        (fp8_casts.our_rowwise, fp8_casts.their_rowwise),
        (fp8_casts.our_tensorwise, fp8_casts.their_tensorwise),
    ):
        for a, b in zip(ours(x), theirs(x), strict=True):
            assert torch.equal(a.float(), b.float())


# Training


@pytest.mark.parametrize(("case", "recipes"), [(LAYER, RECIPES), (LLAMA, RECIPES[1:2])])
def test_recipes_are_timed_and_compared_with_fp32(case, recipes, tmp_path):
    pytest.importorskip("torchao")
    named = {"compile": Way("aot_eager")}
    named |= {f"compile_{recipe}": Way("aot_eager", fp8=recipe) for recipe in recipes}
    result = contest.run("fp8", case, named, EFFORT, tmp_path / "progress")
    assert result["errors"] == {}
    assert list(result["variants"]) == list(named)
    means = {name: sum(found.values()) / len(found) for name, found in result["accuracy"].items()}
    assert list(means) == list(named)
    assert means["compile"] < 0.02
    for recipe in recipes:  # one that was not converted would have the error of bf16
        assert 2 * means["compile"] < means[f"compile_{recipe}"] < 0.3


@pytest.mark.parametrize("what", ["layer", "llama"])
def test_inference_is_quantized_for_both_granularities(what, tmp_path, monkeypatch):
    api = pytest.importorskip("torchao.quantization.quant_api")
    # What it refuses on a CPU is only slow there.
    monkeypatch.setattr(api, "_check_hardware_support", lambda granularity: None)
    case = Case(f"{what}:tiny", 32, FORWARD)
    named = {"compile": Way("aot_eager")}
    named |= {f"compile_{recipe}": Way("aot_eager", fp8=recipe) for recipe in RECIPES[:2]}
    assert [n for n in fp8.variants(case) if n in named] == list(named)
    result = contest.run("fp8", case, named, EFFORT, tmp_path / "progress")
    assert result["errors"] == {}
    worst = {name: max(found.values()) for name, found in result["accuracy"].items()}
    assert worst["compile"] < 0.02
    for recipe in RECIPES[:2]:
        assert 2 * worst["compile"] < worst[f"compile_{recipe}"] < 0.3


def test_conversion_shares_weights_and_leaves_the_head_alone():
    linear = pytest.importorskip("torchao.float8.float8_linear").Float8Linear
    model = fp8.work(LLAMA).model
    assert model.config._attn_implementation == "sdpa_causal"
    own = fp8.converted(model, "rowwise", training=True)
    pairs = list(zip(model.named_parameters(), own.named_parameters(), strict=True))
    assert all(a is b and name == other for (name, a), (other, b) in pairs)
    kinds = {name: type(m) for name, m in own.named_modules() if isinstance(m, torch.nn.Linear)}
    assert kinds.pop("lm_head") is torch.nn.Linear
    assert set(kinds.values()) == {linear}
    assert not any(isinstance(m, linear) for m in model.modules())


def test_without_torchao_its_variants_say_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    named = {"compile": Way("aot_eager"), "coda_rowwise": Way("coda", fp8="rowwise")}
    result = contest.run("fp8", LAYER, named, EFFORT, tmp_path / "progress")
    assert list(result["variants"]) == ["compile"]
    assert "PYTHONPATH" in result["errors"]["coda_rowwise"]
    text = report.short({"environment": {}, "fp8": {LAYER.name: result}})
    assert "NOT MEASURED fp8 layer:tiny-32-training-bf16, coda_rowwise: ImportError" in text


def test_cases_and_variants_can_be_chosen():
    assert [case.name for case in fp8.every()][:2] == [
        "layer:8B-8192-training-bf16",
        "llama:8B-8192-training-bf16",
    ]
    for size in ("layer:9B", "llama:4096/14336/1024", "head:8B"):
        with pytest.raises(KeyError):
            fp8.check(size)
    run = a_run(["--cases", "layer:tiny-32-training-bf16", "--variants", "compile,coda_row*"])
    assert run.variants(run.cases[0]) == ["compile", "coda_rowwise", "coda_rowwise_with_gw_hp"]


# First calls


def a_run(arguments: list[str], folder: Path = Path("unused")) -> grid_run.Run:
    options = grid_run._parser("fp8").parse_args(["--out", str(folder), *arguments])
    assert isinstance(options, argparse.Namespace)
    return grid_run.Run("fp8", options, arguments, 1e9, folder)


def test_each_first_call_has_a_process_and_caches_of_its_own(tmp_path, monkeypatch, capsys):
    seen = []

    def process(run, folder, until, alone, meanwhile):
        order = json.loads(Files(folder).order.read_text())
        seen.append((*order["work"], frozenset(alone.values())))
        if order["work"][1] != "coda":
            Files(folder).result.write_text("12.5")
        else:
            (tmp_path / "log.txt").write_text("Traceback\nImportError: torchao\n")
        return True

    monkeypatch.setattr(grid_run.Run, "process", process)
    name = "llama:tiny-32-training-bf16"
    arguments = ["--cases", "", "--cold", name, "--variants", "compile,coda"]
    run = a_run(arguments, tmp_path)
    run.cold()
    assert [work[:2] for work in seen] == [(name, "compile"), (name, "coda")]
    assert not seen[0][2] & seen[1][2]
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["fp8"][name]["cold_s"] == {"compile": 12.5, "coda": "ImportError: torchao"}
    assert f"{name}, cold: compile 12.5" in capsys.readouterr().out
    row = report.short(written).splitlines()[-1].split()
    assert row == [name, "12.5", "-"]


def test_a_first_call_compiles():
    assert contest.first_call("fp8", LAYER, Way("aot_eager")) > 0


# Tables


def test_gains_are_ratios_of_medians_and_of_the_worst_tensor():
    times = {"compile": 9.0, "coda": 8.0, "compile_rowwise": 10.0, "coda_rowwise": 5.0}
    result = {
        "variants": {name: {"median_ms": ms, "peak_mib": 7.0} for name, ms in times.items()},
        "accuracy": {
            "compile_rowwise": {"a": 0.1, "b": 0.2, "c": 0.0},
            "coda_rowwise": {"a": 0.11, "b": 0.1, "c": 0.5},
        },
        "decisions": {"coda_rowwise": {"gemms": 21, "fused": 20}},
    }
    results = {"fp8": {"layer:8B-8192-training-bf16": result}}
    row = fp8_tables.gains(results, "plain").splitlines()[1].split()
    assert row[1:] == ["rowwise", "2.000", "1.600", "1.800", "20", "of", "21", "1.100"]
    assert fp8_tables.times(results, "plain").splitlines()[1].split()[1:] == [
        *("9.000", "8.000", "10.000", "5.000"),
    ]
    assert "0.1000, 0.2000" in fp8_tables.errors(results, "plain")
    assert fp8_tables.cold(results, "plain") == ""


def test_the_page_has_the_tables(tmp_path):
    result = {"variants": {}, "accuracy": {}, "decisions": {}, "errors": {}, "shape": {}}
    result |= {"profile": {}, "cold_s": {"compile": 61.25}}
    result["variants"] = {"compile": {"median_ms": 1.5, "peak_mib": None}}
    about = environment.describe([]) | {"gpu": "G", "driver": "1"}
    results = {"environment": about, "fp8": {LAYER.name: result}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    plots.write([tmp_path / "results.json"], tmp_path)
    page = (tmp_path / "benchmarks.md").read_text()
    assert "## FP8" in page
    assert "1.500 |" in page
    assert "61.2 |" in page
