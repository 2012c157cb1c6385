# SPDX-License-Identifier: Apache-2.0
"""``python -m coda_inductor check``: what it says and its exit code."""

import json
import runpy
import sys

import pytest
from zoo.users import MISH, SQUARED_SIGMOID, SWISH, write

import coda_inductor
from coda_inductor import patterns, tracing
from coda_inductor.__main__ import main
from coda_inductor.cli import check as command


def results(path: str, capsys) -> tuple[int, dict[str, dict]]:
    code = main(["check", "--json", path])
    found = json.loads(capsys.readouterr().out)
    return code, {r["check"]: r for r in found}


def test_good_file_passes_every_check(tmp_path, capsys):
    code, found = results(write(tmp_path, SWISH), capsys)
    assert code == 0
    kinds = {name.split()[0] for name in found}
    assert kinds >= {"proof", "match", "fires", "float64", "kernel", "plan"}
    sources = [source for _, source in found["kernel source"]["listings"]]
    assert len(sources) == 2  # forward and backward
    assert all("def epilogue(acc" in source for source in sources)


WRONG = MISH.replace("torch.tanh(F.softplus", "torch.sigmoid(F.softplus")


def test_a_file_that_is_wrong_fails_with_the_reason(tmp_path, capsys):
    path = write(tmp_path, WRONG)
    code, found = results(path, capsys)
    assert (code, found["proof"]["outcome"]) == (1, "fail")
    assert main(["check", path]) == 1
    printed = capsys.readouterr().out
    assert " ".join(found["proof"]["detail"].split()) in printed
    assert "\x1b" not in printed  # no colours, no cursor movements


def load(path: str):
    (pattern,) = patterns.load_file(path)
    return pattern


def outcomes(pattern, path) -> dict[str, command.Result]:
    rows = command._try(pattern, path)
    return {row[0]: command.Result(pattern.name, *row) for row in rows}


def test_pattern_that_never_matches_fails(tmp_path, monkeypatch):
    """Each step fails when what it checks is broken: here the pattern is not used at all."""
    path = write(tmp_path, MISH)
    pattern = load(path)
    monkeypatch.setattr(tracing, "on_dynamo", lambda *args: lambda compiled: compiled)
    found = outcomes(pattern, path)
    assert found["match mish_glu"].outcome == "fail"
    assert found["fires mish_glu"].outcome == "fail"
    assert found["kernel source"].outcome == "fail"
    assert found["float64 mish_glu"].outcome == "skip"  # nothing was rewritten
    assert found["plan"].outcome == "skip"


def test_rewriting_that_changes_a_number_fails(tmp_path, monkeypatch):
    try_out = command.try_out

    def off_by_little(*args, **options):
        ours = try_out(*args, **options)
        ours.results[-1] += 1e-9 * ours.results[-1].abs().max()
        return ours

    monkeypatch.setattr(command, "try_out", off_by_little)
    path = write(tmp_path, SQUARED_SIGMOID)
    assert outcomes(load(path), path)["float64 squared_sigmoid"].outcome == "fail"


def test_a_plan_that_is_worse_than_without_the_pattern_fails(tmp_path):
    """A gradient that is given has a power that is no epilogue step."""
    given = "s = torch.sigmoid(x)\n    return 2 * dy * s**5 / s**3 * (1 - s)"
    given = f"def gradient(dy, x):\n    {given}\n\nPATTERN ="
    text = SQUARED_SIGMOID.replace("PATTERN =", given)
    path = write(tmp_path, text.replace("meaning=", "gradient=gradient, meaning="))
    found = outcomes(load(path), path)["plan"]
    assert found.outcome == "fail"
    assert "; without the pattern " in found.detail


def test_a_pattern_that_brings_nothing_is_noted(tmp_path, capsys):
    """All passed was said of a file without which GEMMs do the same."""
    for options, code, said in (([], 0, "9 passed, 1 noted"), (["--must-pay"], 1, "1 failed, 9")):
        assert main(["check", "--quiet", *options, write(tmp_path, MISH)]) == code
        assert capsys.readouterr().out.splitlines()[-2].startswith(said)


BY_MEANING = """
from coda_inductor import Pattern

def my_norm(x, weight):
    return x / (x.abs().mean(-1, keepdim=True) + 1e-5) * weight

PATTERN = Pattern(name="my_norm", meaning=my_norm)
"""


@pytest.mark.parametrize(("text", "said"), [
    (BY_MEANING, "A norm x * scale * weight is written as Pattern.norm("),
    (SWISH.replace("torch.sigmoid(beta *", "torch.sigmoid(beta**2 *"), "alone (pow of beta)"),
], ids=["as a meaning", "numbers"])  # fmt: skip
def test_what_can_never_be_found_is_said(text, said, tmp_path, capsys):
    """A norm as a meaning was a ZeroDivisionError, a number of numbers was just not found."""
    code, found = results(write(tmp_path, text), capsys)
    assert code == 1
    assert said in found["proof"]["detail"]


def test_a_folder_stands_for_its_files(tmp_path, capsys):
    write(tmp_path, SQUARED_SIGMOID, "b.py")
    write(tmp_path, "PATTERN = 1 / 0", "a.py")
    (tmp_path / "__init__.py").touch()
    assert main(["check", "--quiet", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.index("a.py") < said.index("b.py")
    assert "ZeroDivisionError" in said
    assert "float64 squared_sigmoid" in said
    assert "__init__" not in said
    (tmp_path / "empty").mkdir()
    assert main(["check", str(tmp_path / "empty")]) == 2
    assert "no pattern files" in capsys.readouterr().err


def test_a_condition_that_raises_is_shown_with_file_and_line(tmp_path, capsys):
    extra = "meaning=squared_sigmoid, conditions=(broken,)"
    text = SQUARED_SIGMOID.replace("meaning=squared_sigmoid", extra)
    text = text.replace("PATTERN =", "def broken(match):\n    return match.nothing\n\n\nPATTERN =")
    path = write(tmp_path, text)
    line = 1 + text.splitlines().index("    return match.nothing")
    code, found = results(path, capsys)
    assert code == 1
    assert f"'nothing' ({path}:{line})" in str(found)


def test_command_line(tmp_path, monkeypatch, capsys):
    """The module runs as a program; wrong usage has an exit code of its own."""
    for words in (["check", str(tmp_path / "gone.py")], ["x"]):
        monkeypatch.setattr(sys, "argv", ["coda_inductor", *words])
        with pytest.raises(SystemExit) as caught:
            runpy.run_module("coda_inductor", run_name="__main__")
        assert caught.value.code == 2
        assert capsys.readouterr().err
    for word, said in (("--version", coda_inductor.__version__), ("--names", "rms_norm_backward")):
        with pytest.raises(SystemExit) as caught:
            main([word])
        assert not caught.value.code
        assert said in capsys.readouterr().out
