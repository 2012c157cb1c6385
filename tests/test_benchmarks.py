# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' commands: what each is called with, one small run of its core, and the page."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from measured import HOPPER, figures, site

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed

from benchmarks import (  # noqa: E402
    __main__,
    cases,
    environment,
    families,
    first,
    models,
    paper_page,
    report,
    run,
    sweep,
    whole,
    worth,
    worth_models,
    worth_page,
)
from benchmarks.cases import Case, Way  # noqa: E402
from coda_inductor.select.config import legal_configs  # noqa: E402
from coda_inductor.select.device import H100  # noqa: E402
from coda_inductor.select.figures import key_of  # noqa: E402
from coda_inductor.select.store import as_text  # noqa: E402

pytestmark = pytest.mark.timeout(600)
RESULTS = ROOT / "benchmarks/results"
TINY = "tiny-32-training-bf16"
SMALL = ("LlamaForCausalLM", models.LLAMAS["tiny"])


# Commands


@pytest.mark.parametrize("name", __main__.COMMANDS)
def test_each_command_has_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_a_suite_runs_from_the_command_line(tmp_path, monkeypatch, capsys):
    """In a process of its own; eager only, for compiling takes longest."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run.main(["--out", str(tmp_path), "--cases", TINY, "--variants", "eager", "--seconds", "0.01"])
    results = json.loads((tmp_path / "results.json").read_text())
    found = results["families"][TINY]
    assert found["errors"] == {}
    assert len(found["variants"]["eager"]["samples_ms"]) >= 11
    assert all(0 < error < 0.05 for error in found["accuracy"]["eager"].values())
    assert f"{found['variants']['eager']['median_ms']:.3f}" in capsys.readouterr().out
    assert found["profile"]["eager"]["kernels"]
    text = (tmp_path / "results.json").read_text()
    assert str(ROOT) not in text
    assert str(tmp_path) not in text


def test_the_first_step_of_a_case_is_timed_and_judged(tmp_path, monkeypatch, capsys):
    """In this process, uncompiled; then what is written and printed of made-up seconds."""
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(worth_models, "TOKENS", 32)
    monkeypatch.setattr(first, "WIDTHS", (64, 128, 32))
    monkeypatch.setattr(torch, "compile", lambda model, backend: model)
    out = tmp_path / "out.json"
    first.main([str(out), "--part", "--case", "layer", "--backend", "coda"])
    found = json.loads(out.read_text())
    assert found["seconds"] > found["forward"] > 0
    assert found["kernels"] == []

    seconds = {"8b": {"inductor": 20.0, "coda": 30.0}, "layer": {"inductor": 4.0, "coda": 10.1}}
    monkeypatch.setattr(first, "cold", lambda case, name: found | {"seconds": seconds[case][name]})
    first.main([str(out), "--case", "8b", "--case", "layer"])
    assert capsys.readouterr().out.splitlines()[1::2] == [
        "at most 1.25 x + 5 = 30.0 s: True", "at most 1.25 x + 5 = 10.0 s: False",
    ]  # fmt: skip
    rows = json.loads(out.read_text())["results"]
    assert [(row["case"], row["backend"]) for row in rows] == [
        (case, name) for case in ("8b", "layer") for name in ("inductor", "coda")
    ]


def test_a_first_step_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(first.environment, "REPOSITORY", Path("/"))
    assert "No module named benchmarks" in first.cold("layer", "coda")["error"]


# What is measured


@pytest.fixture
def uncompiled(monkeypatch):
    """Nothing is compiled: that takes longest, and other tests do."""
    monkeypatch.setattr(Way, "compile", lambda self, module, **_: module)


@pytest.mark.parametrize(
    "case", ["tiny-16-forward-bf16", "packed-16-training-bf16", "padded-16-training-bf16"]
)
@pytest.mark.usefixtures("uncompiled")
def test_a_case_is_measured(case, monkeypatch):
    monkeypatch.setattr(models, "MASKED", dict.fromkeys(models.MASKED, SMALL))
    monkeypatch.setattr(models, "PADDING", (0, 3))
    monkeypatch.setattr(models, "DOCUMENTS", (5, 11))
    case = Case.parse(case)
    named = {n: w for n, w in cases.ways().items() if n in ("compile", "coda", "compile_causal")}
    named = {n: named[n] for n in families.variants(case) if n in named}
    found = run.contest(case, named, (0.001, 0.0))
    assert found["errors"] == {}
    assert list(found["variants"]) == list(named)
    for name in named:
        assert all(0 < error < 0.1 for error in found["accuracy"][name].values())
    assert found["profile"]["compile"]["kernels"]


def test_cases_are_chosen_by_pattern_or_named():
    every = families.every()
    found = cases.chosen(["1B-8192-*", "tiny-8-training-bf16"], every)
    assert [case.name for case in found] == [
        "1B-8192-forward-bf16", "1B-8192-training-bf16", "tiny-8-training-bf16",
    ]  # fmt: skip
    assert len(set(every)) == 2 * len(families.FAMILIES) + len(models.MASKED)
    for case in every:
        assert Case.parse(case.name) == case
        assert {*families.variants(case)} <= {*cases.ways({"gate": "always"})}


CALM = [(30, 30), (35, 36), (35, 36.05), (35.1, 36.1)]
DISTURBED = [(30, 30), *[(35, 36), (35, 39)] * worth.MOST]


@pytest.mark.parametrize(
    ("pairs", "medians"), [(CALM, (35, 36.05)), (DISTURBED, None), ([(35, 48)] * 50, None)]
)
def test_a_disturbed_step_is_measured_again_or_not_at_all(pairs, medians, monkeypatch):
    """Samples that agree and that the kernels do not explain are no measurement."""
    left = iter(itertools.chain.from_iterable(pairs))
    monkeypatch.setattr(worth, "sustained", lambda _: next(left))
    if medians:
        assert worth.in_turns(("whole", "step"), (34, 34)) == medians
    else:
        with pytest.raises(RuntimeError, match="disturbed"):
            worth.in_turns(("whole", "step"), (34, 34))


def test_cliffs_are_measured_where_they_were_worst_and_shown_worst_first():
    assert worth.cliffs_of("LoRA", ["fuse", "rms_norm", "idioms", "unheard"]) == [
        "idioms", "rms_norm", "unheard",
    ]  # fmt: skip
    off = {"ms": 44.0, "ms_whole": 40.0, "peak": 1.0, "host": 1.0, "kernels": 9}
    one = {"whole": off, "compile": off | {"ms": 48.0}, "without": {"idioms": off | {"ms": 40.0}}}
    two = one | {"without": {"fuse": off, "idioms": off}}
    found = {"environment": {}, "workloads": {"LoRA": one, "GPT-2": two}}
    page = worth_page.page(found, found).partition("## Cliffs")[2]
    assert "idioms` disables all idioms" in page
    rows = [line for line in page.splitlines() if "| 1." in line and "`" in line]
    assert ["1.09x (GPT-2)" in row for row in rows] == [True, True]
    assert all("+10.0%" in row for row in rows)


# Tables that ship


@pytest.mark.parametrize(
    ("sources", "table"),
    [
        (["h100_sweep", "h100_experts_sites", "h100_paper_sites"], "nvidia_h100_80gb_hbm3.json"),
        (
            ["h200_sweep", "h200_heads_sites", "h200_sites_loaded", "h200_experts_sites"],
            "nvidia_h200.json",
        ),
    ],
)
def test_the_shipped_tables_are_made_of_what_is_committed(sources, table, tmp_path):
    shipped, made = H100.sites.parent / table, tmp_path / table
    made.write_text(shipped.read_text())
    sweep.ship([RESULTS / f"{name}.json" for name in sources], made)
    assert json.loads(made.read_text()) == json.loads(shipped.read_text())


def test_a_measured_site_ships_with_its_best_configs(tmp_path):
    one = site()
    us = {str(config): 50.0 + i for i, config in enumerate(legal_configs(one.program))}
    known = {key_of(one): figures(us, 80.0, m=one.m, name=one.name)}
    source, target = tmp_path / "out.json", tmp_path / "nvidia_h900.json"
    source.write_text(as_text(HOPPER, known))
    target.write_text(H100.sites.read_text())
    sweep.ship([source], target)
    (row,) = json.loads(target.read_text())["sites"]
    assert row["us"] == dict(list(us.items())[: sweep._BEST])


# Pages


def test_pages_are_rendered_from_their_files(tmp_path):
    names = ("h200_grid", "h200_families", "h200_families_more", "h200_fp8", "h200_model_train")
    page = tmp_path / "page.md"
    report.main([*(str(RESULTS / f"{name}.json") for name in names), "--page", str(page)])
    assert page.read_text() == report.PAGE.read_text()
    (block,) = whole.BLOCK.findall(whole.PAGE.read_text())
    assert block == whole.table(json.loads((RESULTS / "h200_whole.json").read_text()))
    files = sorted(RESULTS.glob("*_paper.json"))
    pages = [paper_page.markdown(json.loads(file.read_text()), file.name) for file in files]
    assert pages == ([paper_page.PAGE.read_text()] if paper_page.PAGE.exists() else [])


def test_scrub_removes_paths_only():
    text = f"File {ROOT}/coda_inductor/log.py; /some/where/else.so; https://host/a/b and 3/4/5"
    clean = "File coda_inductor/log.py; else.so; https://host/a/b and 3/4/5"
    assert environment.scrub(text) == clean
