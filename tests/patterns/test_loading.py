# SPDX-License-Identifier: Apache-2.0
"""Where pattern files come from, what refuses to load, and that a bad file harms no other."""

import types
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import coda_inductor
from coda_inductor import PatternError, options, patterns
from coda_inductor.log import forget_warnings
from coda_inductor.options import parse
from coda_inductor.patterns import loading
from coda_inductor.patterns.compare import compare
from coda_inductor.patterns.prove import prove

GATE = """
import torch
from coda_inductor import Pattern

FACTOR = {factor}

def meaning(gate, up):
    return torch.sigmoid(gate) * up * FACTOR

PATTERN = Pattern(name="{name}", meaning=meaning)
"""


def write(path: Path, name: str = "mine", factor: float = 2.0, text: str = GATE) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text.replace("{name}", name).replace("{factor}", str(factor)))
    return path


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(loading, "_registered", {})
    loading._load.cache_clear()
    forget_warnings()


def names(found) -> list[str]:
    return [p.name for p in found]


BUILTIN = names(patterns.load())


def test_unreadable_files_are_named(tmp_path):
    path = tmp_path / "latin.py"
    path.write_bytes(b"# \xe9\n")
    with pytest.raises(PatternError, match=r"latin\.py: not a UTF-8 text"):
        patterns.load_file(path)
    with pytest.raises(PatternError, match=r"no such pattern file: .*gone\.py"):
        patterns.load_file(tmp_path / "gone.py")
    with pytest.raises(PatternError, match=r"cannot be read: "):
        patterns.load_file(tmp_path)
    for text, said in (
        ("raise SystemExit(0)", "1: "), ("PATTERNS = []", " define PATTERN"),
        ("x = 1\ny = (\n", "2: Syntax"),
    ):  # fmt: skip
        with pytest.raises(PatternError, match=rf"leaves\.py:{said}"):
            patterns.load_file(write(tmp_path / "leaves.py", text=text))


WRONG = GATE.replace("meaning=meaning)", "meaning=meaning, idioms=(meaning, spelled))")
WRONG = WRONG.replace(
    "PATTERN", "def spelled(gate, up):\n    return gate.sigmoid() * up * 2.000001\n\nPATTERN"
)


def test_a_file_whose_sides_differ_is_refused(tmp_path):
    """By a millionth of the result, or at random. What surrounds the load, here a default device
    and fake tensors, has no effect."""
    drawn = GATE.replace("torch.sigmoid(gate)", "torch.rand_like(gate)")
    for text in (WRONG, drawn):
        path = write(tmp_path / "wrong.py", text=text)
        for around in (torch.device("meta"), FakeTensorMode()):
            loading._load.cache_clear()
            with (
                around,
                pytest.raises(PatternError, match=r"pattern mine: .* the results differ: "),
            ):
                patterns.load_file(path)


@pytest.mark.parametrize(
    "path", sorted(patterns.builtin_folder().glob("*.py")), ids=lambda p: p.stem
)
def test_built_in_file_is_proven(path):
    """Each idiom against the op's definition, or its meaning."""
    for pattern in patterns.load_file(path):
        compare(pattern)  # as for a user's copy
        claims = prove(pattern)
        for idiom in pattern.idioms:
            assert any(claim.startswith(f"{idiom.__name__} ") for claim in claims)


def test_folder_loads_what_loads(tmp_path, caplog):
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


def test_file_counts_once_and_the_options_files_come_first(tmp_path, monkeypatch):
    first, second = write(tmp_path / "a.py", "first"), write(tmp_path / "b.py", "second", 3.0)
    coda_inductor.load_patterns(first)
    coda_inductor.load_patterns(str(first))
    coda_inductor.load_patterns(second)
    assert names(patterns.load()) == ["first", "second", *BUILTIN]
    assert names(patterns.load((str(second),))) == ["second", "first", *BUILTIN]
    monkeypatch.setenv("CODA_PATTERNS", str(tmp_path))
    settings = parse(None, None)
    monkeypatch.setattr(loading, "_registered", {})
    assert names(patterns.load(settings.patterns)) == ["first", "second", *BUILTIN]


def test_ops_are_named_by_content(tmp_path):
    """An edited file gets a new op; the same content is the same op; two files never collide."""

    def op(path: Path, **options):
        (pattern,) = patterns.load_file(write(path, **options))
        return pattern.op

    one = op(tmp_path / "a.py")
    assert str(one).startswith("coda_inductor.mine_")
    assert op(tmp_path / "b.py") is one
    other = op(tmp_path / "a.py", factor=3.0)
    x = torch.rand(3)
    torch.testing.assert_close(other(x, x) / one(x, x), torch.full((3,), 1.5))


def test_a_name_of_a_built_in_rewrite_is_refused(tmp_path, caplog):
    """Two rewrites of one name would be one in counters, reports and disable."""
    taken = write(tmp_path / "taken.py", name="swiglu")
    with pytest.raises(PatternError, match=r"taken\.py: pattern swiglu: that is the name of a"):
        patterns.load((str(taken),))
    with caplog.at_level("WARNING"):
        names = [p.name for p in patterns.load((str(taken),), strict=False)]
    assert names.count("swiglu") == 1
    assert len(caplog.records) == 1


def test_python_that_ignores_the_environment_ignores_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_PATTERNS", path := str(write(tmp_path / "good.py")))
    assert parse(None, {}).patterns == (path,)
    flags = types.SimpleNamespace(ignore_environment=True)
    monkeypatch.setattr(options, "sys", types.SimpleNamespace(flags=flags))
    assert parse(None, {}).patterns == ()
