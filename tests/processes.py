# SPDX-License-Identifier: Apache-2.0
"""What tests of processes share: who lives, and a compile server that compiles nothing."""

from __future__ import annotations

import time
from pathlib import Path

from coda_inductor.runtime import client

#: A compile server that imports nothing; what a request's program says is what its worker does.
QUICK = f"""
import importlib.util, os, sys, time, types
spec = importlib.util.spec_from_file_location("server", {str(client._PROGRAM)!r})
server = importlib.util.module_from_spec(spec)
sys.modules["server"] = server
spec.loader.exec_module(server)

def compile_kernel(request, marker, folder):
    exec(request.program)
    return os.environ.get("ANSWER")

def load(arch, path):
    names = {{"KernelRequest": lambda **fields: types.SimpleNamespace(**fields)}}
    names["compile_kernel"] = compile_kernel
    for name in ("coda_inductor", "coda_inductor.runtime", "coda_inductor.runtime.worker"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["coda_inductor.runtime.worker"]).update(names)

server._load = load
SETTINGS
server.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


def quick_server(folder: Path, settings: str = "") -> Path:
    """The program of such a server. ``settings``: statements about ``server``."""
    path = folder / "quick_server.py"
    path.write_text(QUICK.replace("SETTINGS", settings))
    return path


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


def until(condition, seconds: float = 60):
    """Wait for ``condition()`` to hold, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


def _stat(pid: int) -> list[str]:
    """(state, parent, ...) of a process, or nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
