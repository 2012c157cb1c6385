# SPDX-License-Identifier: Apache-2.0
"""tools/torch_tests.py on a stand-in for a checkout: what fails with us only is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import torch_tests  # noqa: E402

INDUCTOR = """
import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor import config
from unittest import TestCase


class CpuTests(TestCase):
    def test_compiled(self):
        f = torch.compile(lambda x: x.sin() + 1)
        torch.testing.assert_close(f(torch.ones(3)), torch.ones(3).sin() + 1)

    def test_imported_by_name(self):
        def backend(gm, inputs):
            return compile_fx(gm, inputs, config_patches={"max_fusion_size": 8})

        f = torch.compile(lambda x: x.cos() * 2, backend=backend)
        torch.testing.assert_close(f(torch.ones(3)), torch.ones(3).cos() * 2)

    def test_eager(self):
        self.assertEqual(torch.ones(2).sum(), 2)

    def test_fails_in_both(self):
        self.fail()
"""
AOT = """
def test_eager():
    assert True
"""


@pytest.fixture
def checkout(tmp_path):
    for name, text in (
        ("inductor/test_torchinductor.py", INDUCTOR),
        ("functorch/test_aotdispatch.py", AOT),
    ):
        (tmp_path / "test" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "test" / name).write_text(text)
    # What a real one holds besides must not matter.
    (tmp_path / "test" / "conftest.py").write_text("raise RuntimeError")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    return tmp_path / "test"


@pytest.fixture
def compare(checkout, tmp_path, monkeypatch):
    """Calls the program; what passes without us is found once. Its exit status and record."""
    inductors, run = [], torch_tests.run

    def once(args, tests, options):
        if options is not None:
            return run(args, tests, options)
        if not inductors:
            inductors.append(run(args, tests, None))
        return inductors[0]

    def call(*options):
        out = tmp_path / "out.json"
        command = ["torch_tests", checkout, "--out", out, "--jobs", "1", *options]
        monkeypatch.setattr(sys, "argv", [*map(str, command)])
        return torch_tests.main(), json.loads(out.read_text())

    monkeypatch.setattr(torch_tests, "run", once)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return call


@pytest.mark.timeout(900)  # four runs of pytest, and torch's import in each
def test_what_passes_in_both_and_what_only_without_us(compare, capsys):
    file = "inductor/test_torchinductor.py"
    status, record = compare()
    assert status == 0
    assert record["torch"] == torch.__version__
    assert record["only_here"] == record["flaky"] == []
    assert record["files"][file] == {way: {"passed": 3, "failed": 1} for way in ("without", "with")}
    assert record["graphs"] == 2
    # A backend that fails: what compiles through it fails, what does not passes.
    status, record = compare("--options", '{"patterns": ["missing.py"]}')
    assert status == 1
    assert record["only_here"] == [
        f"{file}::CpuTests::{name}" for name in ("test_compiled", "test_imported_by_name")
    ]
    assert record["files"][file]["with"] == {"passed": 1, "failed": 3}
    assert "fails here, passes there" in capsys.readouterr().out


def test_a_folder_without_the_tests_is_refused(tmp_path):
    command = [sys.executable, ROOT / "tools/torch_tests.py", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "give the test/ folder" in ran.stderr
