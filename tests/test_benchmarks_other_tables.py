# SPDX-License-Identifier: Apache-2.0
"""Steps under several tables: what a step's time is, on a GPU that stands for one."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from benchmark_runs import benchmarks as _  # noqa: F401 (makes them importable)
from timed_gpu import LimitedGpu

from benchmarks import other_tables


def test_the_first_of_several_steps_in_a_row_does_not_count(monkeypatch):
    """It runs at the clock that the variant before it left."""
    gpu = LimitedGpu(settles_us=15e3)
    monkeypatch.setattr(other_tables, "torch", SimpleNamespace(cuda=gpu))
    monkeypatch.setattr(other_tables, "synchronize", gpu.synchronize)
    gpu.Event = gpu.event
    order = []

    def step(name: str, watts: float):
        def call():
            order.append(name)
            gpu.draw(100e3, watts)

        return call

    calls = {"hot": step("hot", 1400.0), "cool": step("cool", 500.0)}
    found = other_tables.measured(calls, 2)
    assert [len(samples) for samples in found.values()] == [2 * other_tables.COUNTED] * 2
    assert found["hot"] == pytest.approx([200.0] * 8, rel=0.02)
    assert found["cool"] == pytest.approx([100.0] * 8, rel=0.02)
    row = other_tables.IN_A_ROW
    assert order == ["hot"] * row + ["cool"] * 2 * row + ["hot"] * row


def test_a_folder_of_tables_is_read_while_a_step_is_compiled(monkeypatch, tmp_path):
    monkeypatch.delenv("CODA_TABLES", raising=False)
    with other_tables.tables(None):
        assert "CODA_TABLES" not in os.environ
    with other_tables.tables(tmp_path):
        assert os.environ["CODA_TABLES"] == str(tmp_path)
    assert "CODA_TABLES" not in os.environ
