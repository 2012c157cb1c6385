# SPDX-License-Identifier: Apache-2.0
"""Where pattern files come from, what refuses to load, and that a bad file harms no other. The
process that proves a file imports nothing that lies about, and takes no memory without end."""

from __future__ import annotations

import json
import re
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import coda_inductor
from coda_inductor import PatternError, options, patterns
from coda_inductor.dynamo import attention
from coda_inductor.joint import JointPass
from coda_inductor.options import parse
from coda_inductor.patterns import loading, verdict, worker
from coda_inductor.patterns.source import read, run
from coda_inductor.record import Record

GATE = """
import torch
from coda_inductor import Pattern

FACTOR = {factor}

def meaning(gate, up):
    return torch.sigmoid(gate) * up * FACTOR

PATTERN = Pattern(name="{name}", meaning=meaning)
"""
HANGS = "from coda_inductor import Pattern\nwhile True:\n    pass\n"


def write(path: Path, name: str = "mine", factor: float = 2.0, text: str = GATE) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text.replace("{name}", name).replace("{factor}", str(factor)))
    return path


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No files of other tests, and no verdicts."""
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "_registered", {})
    for cached in (loading._load, loading._warn_once, verdict.refusal):
        cached.cache_clear()


def names(found) -> list[str]:
    return [p.name for p in found]


BUILTIN = names(patterns.load())


def test_unreadable_files_are_named(tmp_path, prove_here):
    path = tmp_path / "latin.py"
    path.write_bytes(b"# \xe9\n")
    with pytest.raises(PatternError, match=r"latin\.py: not a UTF-8 text"):
        patterns.load_file(path)
    with pytest.raises(PatternError, match=r"no such pattern file: .*gone\.py"):
        patterns.load_file(tmp_path / "gone.py")
    with pytest.raises(PatternError, match=r"cannot be read: "):
        patterns.load_file(tmp_path)
    for text in ("raise SystemExit(0)", "import sys_exit"):
        with pytest.raises(PatternError, match=r"leaves\.py:1: "):
            patterns.load_file(write(tmp_path / "leaves.py", text=text))


SLOW = """
def forever(dy, gate, up):
    while True:
        try:
            pass
        except Exception:
            pass

PATTERN = Pattern(name="slow", meaning=meaning, gradient=forever)
"""


def test_slow_file_is_refused_when_its_time_is_up(tmp_path, prove_here, monkeypatch):
    monkeypatch.setattr(verdict, "LIMIT", 1.5)
    path = write(tmp_path / "slow.py", text=GATE + SLOW)
    start = time.monotonic()
    with pytest.raises(PatternError, match=r"takes longer than 1\.5 s") as caught:
        patterns.load_file(path)
    assert time.monotonic() - start < 9
    assert str(caught.value).startswith(f"{path}: ")
    assert "proving slow: meaning has a formula" in str(caught.value)


def test_files_are_proven_in_a_process_of_their_own(tmp_path, monkeypatch):
    """The real thing: a file that hangs is ended, a good one loads, and both are remembered."""
    good, slow = write(tmp_path / "good.py"), write(tmp_path / "slow.py", text=HANGS)
    monkeypatch.setattr(verdict, "LIMIT", 0.5)
    with pytest.raises(PatternError, match=r"takes longer than 0\.5 s"):
        patterns.load_file(slow)
    monkeypatch.setattr(verdict, "LIMIT", 60.0)
    assert names(patterns.load_file(good)) == ["mine"]

    def started(source):
        raise AssertionError(f"{source.path} is proven again")

    monkeypatch.setattr(verdict, "_prove_elsewhere", started)
    with pytest.raises(PatternError, match=r"takes longer than 0\.5 s"):
        patterns.load_file(slow)  # refused once, refused for this process
    for forget in (loading._load.cache_clear, verdict.refusal.cache_clear):
        forget()
        assert names(patterns.load_file(good)) == ["mine"]
    with pytest.raises(AssertionError, match="proven again"):  # another content
        patterns.load_file(write(tmp_path / "good.py", factor=3.0))


def test_process_that_dies_is_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PatternError, match="the process that proves it ended with 1"):
        patterns.load_file(write(tmp_path / "a.py"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with pytest.raises(PatternError, match="no process could be started"):
        patterns.load_file(write(tmp_path / "b.py"))


def test_built_in_files_are_recorded_as_proven():
    """Run tools/record_proofs.py after editing one."""
    recorded = json.loads(verdict.SHIPPED.read_text())
    files = sorted(patterns.builtin_folder().glob("*.py"))
    assert recorded == {path.name: read(path).digest for path in files}


@pytest.mark.parametrize(
    "path", sorted(patterns.builtin_folder().glob("*.py")), ids=lambda p: p.stem
)
def test_built_in_file_is_proven(path):
    """Each idiom against the op's definition, or its meaning."""
    claims = []
    worker.patterns_of(read(path), told=lambda pattern, claim: claims.append(claim))
    for pattern in patterns.load_file(path):
        for idiom in pattern.idioms:
            assert any(claim.startswith(f"{idiom.__name__} ") for claim in claims)


def test_folder_loads_what_loads(tmp_path, prove_here, caplog):
    write(tmp_path / "folder" / "a.py", "first")
    broken = write(tmp_path / "folder" / "b.py", text="PATTERN = 1 / 0")
    write(tmp_path / "folder" / "c.py", "third", factor=3.0)
    with pytest.raises(PatternError, match="ZeroDivisionError"):
        coda_inductor.load_patterns(tmp_path / "folder", strict=True)
    assert names(patterns.load()) == BUILTIN
    with caplog.at_level("WARNING"):
        found = coda_inductor.load_patterns(tmp_path / "folder")
    assert names(found) == ["first", "third"]
    (said,) = [r.getMessage() for r in caplog.records]
    assert f"{broken}:1: ZeroDivisionError" in said
    assert names(patterns.load()) == ["first", "third", *BUILTIN]
    with pytest.raises(PatternError, match="ZeroDivisionError"):
        coda_inductor.load_patterns(broken)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PatternError, match="no pattern files"):
        coda_inductor.load_patterns(tmp_path / "empty")
    with pytest.raises(PatternError, match="no such pattern file"):
        coda_inductor.load_patterns(tmp_path / "nowhere")


def test_file_counts_once_and_the_options_files_come_first(tmp_path, prove_here, monkeypatch):
    first, second = (
        write(tmp_path / "a.py", "first"),
        write(tmp_path / "b.py", "second", factor=3.0),
    )
    coda_inductor.load_patterns(first)
    coda_inductor.load_patterns(str(first))
    coda_inductor.load_patterns(second)
    assert names(patterns.load()) == ["first", "second", *BUILTIN]
    assert names(patterns.load((str(second),))) == ["second", "first", *BUILTIN]
    monkeypatch.setenv("CODA_PATTERNS", str(tmp_path))
    settings = parse(None, None)
    assert settings.patterns == (str(tmp_path),)
    monkeypatch.setattr(loading, "_registered", {})
    assert names(patterns.load(settings.patterns)) == ["first", "second", *BUILTIN]


def key(**options) -> object:
    return JointPass(Record(parse(None, options))).uuid()


def test_patterns_are_part_of_cache_keys(tmp_path, prove_here):
    bare = key()
    path = write(tmp_path / "a.py")
    given = key(patterns=[path])
    coda_inductor.load_patterns(path)
    registered = key()
    assert len({bare, given, registered}) == 3
    assert key() == registered
    write(tmp_path / "a.py", factor=3.0)
    assert key() != registered
    assert key(patterns=[path]) != given


def test_ops_are_named_by_content(tmp_path, prove_here):
    """An edited file gets a new op; the same content is the same op; two files never collide."""

    def op(path: Path, **options):
        (pattern,) = patterns.load_file(write(path, **options))
        return pattern.op

    one = op(tmp_path / "a.py")
    assert str(one).startswith("coda_inductor.mine_")
    assert op(tmp_path / "b.py") is one
    other = op(tmp_path / "a.py", factor=3.0)
    assert other is not one
    x = torch.rand(3)
    torch.testing.assert_close(other(x, x) / one(x, x), torch.full((3,), 1.5))


def test_file_is_run_as_it_was_read(tmp_path, prove_here):
    """What was proven is what runs, whatever stands on disk by then."""
    path = write(tmp_path / "a.py")
    source = read(path)
    path.write_text("PATTERN = 1 / 0")
    assert names(run(source)) == ["mine"]


def test_a_name_of_a_built_in_rewrite_is_refused(tmp_path, prove_here, caplog):
    """Two rewrites of one name would be one in counters, reports and disable."""
    taken = write(tmp_path / "taken.py", name="swiglu")
    with pytest.raises(PatternError, match=r"taken\.py: pattern swiglu: that is the name of a"):
        patterns.load((str(taken),))
    with caplog.at_level("WARNING"):
        names = [p.name for p in patterns.load((str(taken),), strict=False)]
    assert names.count("swiglu") == 1
    assert caplog.text.count("options={'disable': ['swiglu']}") == 1


def test_every_documented_rewrite_has_a_name_of_its_own():
    table = (Path(__file__).resolve().parents[2] / "docs" / "patterns.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert {"swiglu", "constant_mask", "epilogue"} <= documented <= loading.builtin_names()
    assert set(attention.NAMES) <= loading.builtin_names()


def test_a_file_that_takes_too_much_memory_is_refused(tmp_path):
    path = write(tmp_path / "large.py", text="HELD = bytearray(6 << 30)\n" + GATE)
    assert str(verdict._prove_elsewhere(read(path))).startswith(f"{path}:1: MemoryError")


def test_a_record_that_is_damaged_is_none(tmp_path, monkeypatch):
    source = read(write(tmp_path / "good.py"))
    verdict.record(source)
    assert verdict._recorded(source)
    (record,) = (tmp_path / "cache" / "proofs").iterdir()
    record.write_text("")
    assert not verdict._recorded(source)


def test_python_that_ignores_the_environment_ignores_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_PATTERNS", path := str(write(tmp_path / "good.py")))
    assert parse(None, {}).patterns == (path,)
    flags = types.SimpleNamespace(ignore_environment=True)
    monkeypatch.setattr(options, "sys", types.SimpleNamespace(flags=flags))
    assert parse(None, {}).patterns == ()
