# SPDX-License-Identifier: Apache-2.0
"""What tests of processes share: who lives, and children that do as they are told."""

import os
import subprocess
import sys
import time
from pathlib import Path

import coda_inductor

PACKAGE = Path(coda_inductor.__file__).parent
#: A child that runs the statements of each message; ``say`` answers.
TOLD = """
import json, os, signal, sys, time

def main(parent, *arguments):
    def say(**answer):
        parent.send(answer)

    while True:
        exec(parent.recv()["do"], globals() | locals())
"""

#: A compile worker that imports nothing, and does what a request's program says.
QUICK = f"""
import os, sys, time, types

def compile_kernel(request, folder):
    exec(request.program)
    return os.environ.get("ANSWER")

sys.modules["coda_inductor"] = package = types.ModuleType("coda_inductor")
package.__path__ = [{str(PACKAGE)!r}]
from coda_inductor.runtime import compiler
compiler.compile_kernel, compiler.prepare = compile_kernel, lambda: None
SETTINGS
main = compiler.main
"""


def python(
    *arguments: object, check: bool = True, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with our package and the tests on its path, and these variables besides. With
    ``check`` it must end well, or what it said is the error."""
    paths = map(str, (PACKAGE.parent, Path(__file__).parent, os.environ.get("PYTHONPATH", "")))
    own = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), **environment}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, check=False, cwd=cwd
    )
    assert not check or done.returncode == 0, done.stderr[-4000:]
    return done


def told(folder: Path, monkeypatch) -> str:
    return _module(folder, "told", TOLD, monkeypatch)


def quick_worker(folder: Path, monkeypatch, settings: str = "") -> str:
    """The name of the module :data:`QUICK`. ``settings``: statements about ``compiler``."""
    return _module(folder, "quick_worker", QUICK.replace("SETTINGS", settings), monkeypatch)


def _module(folder: Path, name: str, text: str, monkeypatch) -> str:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return name


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``, but for those that have ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            found += [int(folder.name)] if int(fields[1]) == pid and fields[0] != "Z" else []
    return found


def alive(pid: int) -> bool:
    """Does it run? One that nobody has waited for does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def until(condition):
    """Wait for ``condition()`` to hold, and return it. The deadline is CI's."""
    while not (value := condition()):
        time.sleep(0.02)
    return value


def _stat(pid: int) -> list[str]:
    """(state, parent, ...) of a process, or nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
