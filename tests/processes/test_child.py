# SPDX-License-Identifier: Apache-2.0
"""What all of our processes promise, here of one that does as it is told: nothing outlives the one
that started it, nobody waits for it in vain, and it imports what that one does."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sympy
import torch
from processes import alive, told, until

import coda_inductor
from coda_inductor.processes.child import Child

FOR_EVER = "time.sleep(1e6)"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start such a process; it is ended after the test."""
    module, made = told(tmp_path, monkeypatch), []

    def start(*arguments: str, **how) -> Child:
        made.append(Child(module, *arguments, **how))
        return made[-1]

    yield start
    for process in made:
        process.end()
    assert not any(alive(process.pid) for process in made)


def ask(process: Child, do: str, seconds: float = 60.0) -> dict:
    return process.ask({"do": do}, time.monotonic() + seconds)


def test_it_answers(start):
    """What a library prints is no answer; one before an end counts."""
    process = start("a", "b")
    assert alive(process.pid)
    assert ask(process, "say(arguments=arguments)") == {"arguments": ["a", "b"]}
    assert ask(process, "say(one=1); say(two=2)") == {"one": 1}
    assert process.answer(time.monotonic() + 60) == {"two": 2}
    do = "print('hello', flush=True); os.system('echo hello'); say(read=sys.stdin.read())"
    assert ask(process, do) == {"read": ""}
    assert ask(process, "say(ready=True); os._exit(0)") == {"ready": True}


@pytest.mark.parametrize(("do", "said"), [
    ("print('first\\nthe last', file=sys.stderr, flush=True); os._exit(3)", "the last"),
    ("os.kill(os.getpid(), 9)", "status -9"),
    ("raise ImportError('no libfoo')", "ImportError: no libfoo"),
    ("parent.send_bytes(b'no JSON')", "status -9"),
])  # fmt: skip
def test_its_last_words_are_the_reason(do, said, start):
    process = start()
    with pytest.raises(ChildProcessError, match=said):
        ask(process, do)
    assert not alive(process.pid)
    with pytest.raises(ChildProcessError):  # nor does it answer another question
        ask(process, "say(ready=True)")


@pytest.mark.parametrize("late", [False, True])
def test_to_end_waits_for_nothing(late, start):
    """It is stopped, or late, and ignores a signal."""
    process = start()
    ask(process, "signal.signal(15, signal.SIG_IGN); say()")
    if late:
        with pytest.raises(TimeoutError):
            ask(process, FOR_EVER, 0.5)
    else:
        os.kill(process.pid, signal.SIGSTOP)
        process.end()
    assert not alive(process.pid)


@pytest.mark.parametrize(("ends", "do"), [
    (lambda: os.kill(os.getpid(), 9), "signal.signal(15, signal.SIG_IGN); " + FOR_EVER),
    (lambda: os._exit(0), "while True: pass"),
], ids=["SIGKILL", "os._exit"])  # fmt: skip
def test_it_ends_with_its_parent(ends, do, start, tmp_path):
    """Whatever it does; also where another child of the parent's holds the connection."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            faulthandler.disable()  # pytest's, which would print an abort
            process = start()
            os.set_inheritable(process.connection.fileno(), True)
            command = [sys.executable, "-c", f"import time; {FOR_EVER}"]
            other = subprocess.Popen(command, close_fds=False)
            process.connection.send({"do": do})
            os.write(write, f"{process.pid} {other.pid}".encode())
            ends()
        finally:
            os._exit(1)
    os.close(write)
    left, other = map(int, os.read(read, 100).split())
    os.close(read)
    os.waitpid(parent, 0)
    try:
        until(lambda: not alive(left))
    finally:
        os.kill(other, signal.SIGKILL)


def test_neither_interrupts_nor_logs_of_the_user_are_for_it(start, monkeypatch):
    for name in ("TORCH_LOGS", "CODA_DEBUG"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CODA_CACHE_DIR", "/somewhere")
    process = start(environment={"MORE": "1"})
    assert ask(process, "say(session=os.getsid(0))") == {"session": process.pid}
    assert process.pid != os.getsid(0)
    found = ask(process, "say(**os.environ)")
    assert not {"TORCH_LOGS", "CODA_DEBUG"} & set(found)
    assert (found["CODA_CACHE_DIR"], found["MORE"]) == ("/somewhere", "1")


def test_nothing_is_imported_from_the_current_folder(start, tmp_path, monkeypatch):
    """Which a program that is run as ``python -m`` or typed in has on its path."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "sympy", "torch", "coda_inductor", "sitecustomize", "threading"):
        (here / f"{name}.py").write_text(f"raise SystemExit('planted {name}')")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(here))
    monkeypatch.setattr(sys, "path", ["", str(here), ".", *sys.path])
    modules = "sympy, torch, coda_inductor"
    do = f"import {modules}; say(files=[m.__file__ for m in ({modules})])"
    assert ask(start(), do)["files"] == [m.__file__ for m in (sympy, torch, coda_inductor)]


def test_what_it_needs_is_found_where_the_parent_has_it(start, monkeypatch):
    """Even if that is the current folder, of a checkout. Entries that import ignores stay here."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/somewhere"), b"/bytes"])
    monkeypatch.chdir(Path(coda_inductor.__file__).parents[1])
    do = "import coda_inductor; say(file=coda_inductor.__file__)"
    assert ask(start(), do) == {"file": coda_inductor.__file__}
