# SPDX-License-Identifier: Apache-2.0
"""Find the pass, pattern or GEMM that makes a script fail, fall back, or its result differ.

The script runs again and again, each time without other parts of the backend. Exit status 0 is
good, any other is bad: a script that checks a result must raise if it is wrong. If the script
succeeds, all runs are strict: then a fallback is an error.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from coda_inductor.errors import CodaError, OptionError
from coda_inductor.options import EVERYTHING, GEMM
from coda_inductor.pipeline import ON_ATEN, ON_DYNAMO

# Torch's CompilerBisector compiles the whole script with one backend, also what ours is compared
# with, and leaves out the last calls of one kind of pass: neither serves here.
HELP = "find the pass, pattern or GEMM that makes a script fail"
PASSES = list(dict.fromkeys(p.name for p in (*ON_DYNAMO, *ON_ATEN) if not p.needed))
SEND = "Please report it: send this paragraph, and what docs/debugging.md asks for."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("script", type=Path, help="a Python file; exit status 0 is good")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Search for the culprit and print it. Returns 0. Raises OptionError if there is no such
    script, and CodaError if the script succeeds, or it fails without this backend too."""
    name = str(arguments.script)
    if not arguments.script.is_file():
        raise OptionError(f"no such script: {name}")
    script = _Script([sys.executable, name, *arguments.args])
    with tempfile.TemporaryDirectory() as folder:
        debug = {"CODA_DEBUG": "1", "CODA_DEBUG_DIR": folder}
        error = script.error("as it is", (), **debug)
        if not error:
            name, script.settings["CODA_STRICT"] = f"{name} with CODA_STRICT=1", "1"
            error = script.error("with CODA_STRICT=1", (), **debug)
        done = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("*/names.json"))]
    if not error:
        raise CodaError(
            f"{name} succeeds here. A script about a wrong result must compare it and raise. If it "
            "fails elsewhere, torch's compile cache may matter, which is off here"
        )
    if plain := script.error("with stock Inductor", [EVERYTHING]):
        raise CodaError(f"this backend is not the cause: {name} fails without it: {plain}")
    kinds = ("changed", "fired", "fused")
    names = [list(dict.fromkeys(n for graph in done for n in graph[kind])) for kind in kinds]
    sys.stdout.write(f"{_cause(name, script, error, *names)} {SEND}\n")
    return 0


def _cause(
    name: str, script: "_Script", error: str, changed: list[str], fired: list[str], fused: list[str]
) -> str:
    out = passes = script.guilty("passes", changed) or script.guilty("passes", PASSES)
    if not passes:
        return (
            f"{name} fails ({error}) without any pass that can be left out, and succeeds with "
            f"stock Inductor, which CODA_DISABLE='{EVERYTHING}' chooses."
        )
    text = f"The pass {_listed(passes)}" if len(passes) == 1 else f"Each of {_listed(passes)}"
    if patterns := script.guilty("patterns and counters", fired):
        text, out = f"{text} (pattern or counter {_listed(patterns)})", patterns
    text += f" makes {name} fail"
    gemms = list(dict.fromkeys(GEMM + path for site in fused for path in _paths(site)))
    if "fuse" in passes and (sites := script.guilty("GEMMs", gemms, first=True)):
        alone = not script.error(f"without {sites[0]}", sites)
        text += f", at the GEMM `{sites[0].removeprefix(GEMM)}`{'' if alone else ' first'}"
        out = sites if alone else out
    also = f"options={{'disable': {out}}} or CODA_DISABLE='{','.join(out)}'"
    return f"{text}: {error}. It succeeds with {also}."


class _Script:
    """The user's script. Each run is a new process."""

    def __init__(self, command: list[str]):
        self.command, self.runs = command, 0
        self.settings = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}

    def guilty(self, kind: str, names: list[str], *, first: bool = False) -> list[str]:
        """The ``names`` that the script needs disabled to succeed (with ``first``, only the first
        one); an empty list if it fails even with all ``names`` disabled."""
        good, errors = set[str](), dict[str, str]()

        def fails(tried: Sequence[str]) -> str:
            if first and errors:
                return ""  # the others do not matter
            out = [name for name in names if name not in good and name not in tried]
            error = self.error(f"with {len(names) - len(out)} of {len(names)} {kind}", out)
            good.update(() if error else tried)
            return error

        if names and not fails(()):
            _halve(names, fails, errors, "it failed with all of them")
        return list(errors)

    def error(self, label: str, disable: Sequence[str], **variables: str) -> str:
        """The script's error when the names in ``disable`` are disabled; empty if it succeeds."""
        out = ",".join([*filter(None, [os.environ.get("CODA_DISABLE")]), *disable])
        settings = {**self.settings, "CODA_DISABLE": out, **variables}
        error = _run(self.command, {**os.environ, **settings})
        self.runs += 1
        sys.stderr.write(f"run {self.runs}, {label}: {f'bad ({error})' if error else 'good'}\n")
        return error


def _halve(
    names: Sequence[str], fails: Callable[[Sequence[str]], str], out: dict[str, str],
    error: str = "",
) -> str:  # fmt: skip
    """Find the ``names`` that fail and add them to ``out``, with their errors. ``fails(part)``
    returns the error with the names ``part``; if it is empty, all later calls include that part.
    Returns the error with all names, which is ``error`` if the caller knows it."""
    error = error or fails(names)
    if error and len(names) == 1:
        out[names[0]] = error
    elif error:
        half = len(names) // 2
        # If the first half does not fail, the second one does.
        first = _halve(names[:half], fails, out)
        _halve(names[half:], fails, out, "" if first else error)
    return error


def _run(command: list[str], environment: dict[str, str]) -> str:
    """Why ``command`` fails: its last error, its last line, or its status; empty if it succeeds."""
    with tempfile.TemporaryFile() as text:  # a pipe would stay open as long as the script's workers
        status = subprocess.run(  # noqa: S603 (the user's own script)
            command, env=environment, stdout=subprocess.DEVNULL, stderr=text, check=False
        ).returncode
        text.seek(0)
        lines = text.read().decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    lines = [line for line in lines if not re.match(r"\s|.*Warning: ", line)]  # nor its source
    return (errors or lines or [f"exit status {status}"])[-1][:200] if status else ""


def _paths(site: str) -> list[str]:
    """The module paths of a fused site: ``mlp.gate`` and ``mlp.up`` for ``mlp.gate + up``."""
    first, *others = site.split(" + ")
    return [first, *(first[: first.rfind(".") + 1] + other for other in others)]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
