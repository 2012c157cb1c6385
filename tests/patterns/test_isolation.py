# SPDX-License-Identifier: Apache-2.0
"""The process that proves a file imports nothing that lies about, and takes no memory without end;
what the environment may say about patterns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coda_inductor import PatternError, cache_dir, patterns
from coda_inductor.patterns import verdict, worker
from coda_inductor.patterns.source import read

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
import torch
from coda_inductor import Pattern

def meaning(gate, up):
    return torch.sigmoid(gate) * up * 2

PATTERN = Pattern(name="mine", meaning=meaning)
"""


#: No verdicts of other tests.
pytestmark = pytest.mark.usefixtures("fresh")


def write(path: Path, text: str = GOOD) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return path


def test_nothing_is_imported_from_the_current_folder(tmp_path, monkeypatch):
    path = write(tmp_path / "good.py")
    for name in ("sympy", "torch", "json", "mpmath", "coda_inductor", "sitecustomize"):
        write(tmp_path / "here" / f"{name}.py", f"raise SystemExit('planted {name}')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "here"), ".", *sys.path])
    assert verdict._prove_elsewhere(read(path)) is None


def test_the_process_has_the_package_of_its_parent(tmp_path, monkeypatch):
    """Also where that was found in the current folder, of which nothing else is imported."""
    path = write(
        tmp_path / "a.py", "import coda_inductor\nraise ValueError(coda_inductor.__file__)"
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    package = Path(verdict.__file__).parents[1] / "__init__.py"
    assert f"ValueError: {package}" in str(verdict._prove_elsewhere(read(path)))


def test_torch_is_found_where_the_parent_has_it(monkeypatch):
    """Even if that is the current folder: a PyTorch checkout."""
    place = Path(torch.__file__).parents[1]
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", ["/usr/lib/nothing", str(place)])
    assert verdict._search_path() == ["/usr/lib/nothing", str(place)]


def test_a_file_that_takes_too_much_memory_is_refused(tmp_path):
    path = write(tmp_path / "large.py", "HELD = bytearray(6 << 30)\n" + GOOD)
    said = str(verdict._prove_elsewhere(read(path)))
    assert f"{path}: loading and proving it takes more than 4 GiB of memory (running the" in said


def test_running_out_of_memory_is_named_whatever_it_was_taken_for(tmp_path):
    text = GOOD.replace("return", "raise MemoryError\n    return")
    path = write(tmp_path / "large.py", text)
    with pytest.raises(PatternError, match=r"large\.py: .* more than 4 GiB of memory"):
        worker.patterns_of(read(path))


def test_a_record_that_is_damaged_is_none(tmp_path, monkeypatch):
    source = read(write(tmp_path / "good.py"))
    verdict.record(source)
    assert verdict._recorded(source)
    (record,) = (tmp_path / "cache" / "proofs").iterdir()
    record.write_text("")
    assert not verdict._recorded(source)


def test_records_of_a_folder_that_can_only_be_read_count(tmp_path, monkeypatch, prove_here):
    path = write(tmp_path / "good.py")
    verdict.record(read(path))
    image = tmp_path / "cache"
    monkeypatch.setattr(cache_dir, "writable", lambda path: path != image)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(verdict, "_proven", set())
    monkeypatch.setattr(verdict, "_prove_elsewhere", lambda source: f"{source.path} proven again")
    assert [p.name for p in patterns.load_file(path)] == ["mine"]


ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from coda_inductor.options import parse
print(json.dumps(parse(None, {}).patterns))
"""


@pytest.mark.parametrize("flags", [[], ["-E"]])
def test_python_that_ignores_the_environment_ignores_ours(flags, tmp_path):
    path = str(write(tmp_path / "good.py"))
    environment = {**os.environ, "CODA_PATTERNS": path}
    done = subprocess.run(
        [sys.executable, *flags, "-c", ASK, str(ROOT)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == ([] if flags else [path])
