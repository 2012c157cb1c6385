# SPDX-License-Identifier: Apache-2.0
"""Gains on more GPUs than were measured, computed from those that were."""

from __future__ import annotations

import json

import pytest

from benchmarks.environment import REPOSITORY
from benchmarks.scaling import rows, step_ms


def case(compile_ms: float, coda_ms: float, collectives_ms: float, others_ms: float) -> dict:
    us = {"collectives_us": 1e3 * collectives_ms, "total_us": 1e3 * (collectives_ms + others_ms)}
    times = {"compile": compile_ms, "coda": coda_ms}
    return {
        "variants": {name: {"median_ms": ms} for name, ms in times.items()},
        "profile": dict.fromkeys(times, us),
    }


def test_two_ranks_are_what_was_measured():
    assert step_ms(80.0, 25.0, 10.0, ranks=2, bandwidth=1.0) == 90.0


def test_what_was_hidden_shows_once_it_takes_longer_than_computing():
    assert step_ms(80.0, 25.0, 0.0, ranks=8, bandwidth=1.0) == 80.0
    assert step_ms(80.0, 25.0, 0.0, ranks=8, bandwidth=0.25) == 25.0 * 1.75 * 4
    assert step_ms(80.0, 25.0, 5.0, ranks=8, bandwidth=1.0) == 80.0 + 5.0 * 1.75


def test_a_gain_is_less_where_collectives_take_more():
    ((name, computing, collectives, open_, step, two, eight, many),) = rows(
        {"a": case(100.0, 90.0, 20.0, 85.0)}
    )
    assert (name, collectives, open_, computing, step) == ("a", 20.0, 5.0, 95.0, 100.0)
    assert two == pytest.approx(100 / 90)
    assert eight == pytest.approx((95 + 5 * 1.75) / (85 + 5 * 1.75))
    assert 1.0 <= many < eight < two


def test_tensor_parallel_ranks_have_no_batch_of_their_own():
    assert rows({"tensor 8B 4096": case(100.0, 90.0, 20.0, 85.0)}) == []


def test_the_documents_table_is_that_of_the_results():
    results = REPOSITORY / "benchmarks" / "results" / "h200x2_distributed.json"
    text = (REPOSITORY / "docs" / "distributed.md").read_text()
    for name, *numbers in rows(json.loads(results.read_text())["distributed"]):
        cells = [f"{x:.1f}" for x in numbers[:4]] + [f"{x:.3f}" for x in numbers[4:]]
        line = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
        assert [cell.strip() for cell in line.strip("|").split("|")][1:] == cells
