# SPDX-License-Identifier: Apache-2.0
"""What README and docs say in numbers comes from files in benchmarks/results.

The README's are made by ``tools/gains.py``. A page names its files: each time and each size in it
is a figure of one of these, and each factor the ratio of two numbers near it.
"""

import importlib
import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = (ROOT / "README.md").read_text(), ROOT / "docs"
sys.path.insert(0, str(ROOT / "tools"))
gains: Any = importlib.import_module("gains")

#: A number with its unit.
SAID = re.compile(r"(?<![\w.,-])(\d+(?:\.\d+)?)( ?(?:ms|us|[GM]iB)\b|x(?!\w))")
CELL = re.compile(r"(?<![\w.,-])(\d+\.\d+)(x(?!\w)|\b(?!\.))")
#: No measurement of ours: a setting, a constant, the weights of a model, a rounded prediction.
NOT_MEASURED = {
    "memory.md": {"40 GiB", "6.09 ", "6.8 GiB", "78.6 GiB"}, "options.md": {"40 GiB"},
    "distributed.md": {"25 MiB"},
    "training.md": {"15 GiB"}, "tuning.md": {"6 us"},
}  # fmt: skip
PAGES = sorted(p for p in DOCS.rglob("*.md") if "internals" not in p.parts)


def test_blocks_and_pictures_are_what_the_results_say():
    assert {m[1]: m[0] for m in gains.BLOCK.finditer(README)} == gains.blocks()
    for name, colors in gains.PICTURES.items():
        assert (DOCS / name).read_text() == gains.picture(*colors)


def test_the_readme_has_no_figure_of_its_own_and_fits():
    rest = gains.BLOCK.sub("", README)
    assert not SAID.findall(rest)
    assert len(README.splitlines()) <= 110
    rows = gains.table()
    assert len(rows) <= 10
    assert not re.search(r"\bfastest\b", README)
    assert all(row.before.ms > 0 < row.after.ms for row in rows)


def test_a_baseline_is_the_least_time_of_its_run_or_its_row_names_it():
    """Of rows whose runs have variants with a mask and without."""
    rows = {row.who: row for row in gains.table()}
    masks = gains.results("h200_masks_torch215")["results"]
    experts = gains.results("h200_experts_torch215")["results"]["olmoe, 8 layers, training"]
    runs = {
        "mixtures of experts": {k: v for k, v in experts.items() if k.startswith("new: ")},
        "long prompts": gains.results("h200_prefill_torch215")["results"]["Llama 1B prefill"],
        "packed documents (1)": masks["packed"],
        "padded batches (1)": masks["padded"],
    }
    for who, run in runs.items():
        least = min(v["median_ms"] for k, v in run.items() if "coda" not in k)
        assert rows[who].before.ms == least
    stock = gains.results("h200_memory_torch215")["results"]["8B x8"].items()
    fits = [v["ms"] for k, v in stock if "compile" in k and v["peak"] <= gains.SHORT.after.gib]
    assert gains.SHORT.before.ms == min(fits)


def leaves(part: Any) -> Iterator[float]:
    """Each number of a results file, and the median of each list of them."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key != "environment":
                yield from leaves(value)
    elif isinstance(part, list):
        if part and all(isinstance(each, dict) for each in part):
            for key in part[0]:
                column = [each[key] for each in part if isinstance(each.get(key), (int, float))]
                if column:
                    yield statistics.median(column)
        elif part and all(isinstance(each, (int, float)) for each in part):
            yield statistics.median(part)
        for each in part:
            yield from leaves(each)
    elif isinstance(part, (int, float)):
        yield from (float(part), part / 1024)  # bytes in MiB are told in GiB


def figures(block: str) -> Iterator[tuple[str, str]]:
    """(number, unit) of a paragraph, or of the cells of a table of times and sizes."""
    head, _, *rows = [line.split("|") for line in block.strip().splitlines()] + [[], []]
    if len(head) > 1 and re.search(r"\bms\b|GiB|MiB", block.lstrip().partition("\n")[0]):
        # Names of cases and settings have digits too.
        names = {0, 1, *(i for i, title in enumerate(head) if "setting" in title)}
        for row in rows:
            yield from CELL.findall("|".join(c for i, c in enumerate(row) if i not in names))
    else:
        yield from ((number, unit.strip()) for number, unit in SAID.findall(block))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_of_a_page_are_in_the_files_that_it_names(page):
    text = re.sub(r"^```.*?^```$|<!-- measured -->.*?<!-- /measured -->", "", page.read_text(),
                  flags=re.DOTALL | re.MULTILINE)  # fmt: skip
    if text.startswith(("# Stock models", "# The paper")):
        return  # pages that a tool writes whole
    files = set(re.findall(r"\b(h\d00\w*)\.json", text))
    known = [
        v for f in files for v in leaves(json.loads((gains.RESULTS / f"{f}.json").read_text()))
    ]
    wrong = []
    before = ""
    for block in re.split(r"\n\s*\n", text):
        near = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]\d)", before + block)
        beside, before = [float(n) for n in near], block
        for number, unit in figures(block):
            digits = len(number.partition(".")[2])
            if unit == "x":
                near = 0.5 * 10**-digits + 0.005
                ok = any(b and abs(a / b - float(number)) <= near
                         for a, b in itertools.permutations(beside, 2))  # fmt: skip
            else:
                ok = any(f"{value:.{digits}f}" == number for value in known)
            if not ok and f"{number} {unit}" not in NOT_MEASURED.get(page.name, ()):
                wrong.append((f"{number} {unit}", block.strip()[:50]))
    assert not wrong


def test_the_readme_names_what_continuous_integration_runs():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert f"\n{command} " in README
