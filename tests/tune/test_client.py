# SPDX-License-Identifier: Apache-2.0
"""The measuring process, here one that does as it is told: crash, hang, outlive its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import alive, until

from coda_inductor.tune import client
from coda_inductor.tune.client import DeadError, Process

#: Runs the statements of each message; ``say`` answers.
STUB = """
def say(**answer):
    print(json.dumps(answer), flush=True)

for line in sys.stdin:
    exec(json.loads(line)["do"])
"""
START = client._START.partition("from coda_inductor.tune.worker")[0] + STUB


@pytest.fixture
def started():
    """Start such a process; it is ended after the test."""
    made: list[Process] = []

    def start(patience: float = 20.0) -> Process:
        made.append(Process(3, START, patience))
        return made[-1]

    yield start
    for process in made:
        with contextlib.suppress(ValueError):
            process.end()
    assert not any(alive(process.pid) for process in made)


def ask(process: Process, do: str, seconds: float = 20.0) -> dict:
    return process.ask({"do": do}, time.monotonic() + seconds)


def test_it_answers(started):
    process = started()
    assert alive(process.pid)
    assert ask(process, "say(ready=True)") == {"ready": True}
    assert ask(process, "say(index=sys.argv[1])") == {"index": "3"}
    tried = "say(trying='a'); say(trying='b'); say(figures={'us': 1.5})"
    assert ask(process, tried) == {"figures": {"us": 1.5}}


def test_it_imports_what_this_process_does(started):
    found = ask(started(), "say(path=sys.path)")["path"]
    assert found[-1] == str(Path(client.__file__).parents[2])
    assert set(found) >= {path for path in client.import_path() if path}


def test_its_last_words_are_the_reason(started):
    process = started()
    do = "say(trying='64x64'); print('first\\nthe last line', file=sys.stderr); os._exit(3)"
    with pytest.raises(DeadError, match="ends its process: the last line") as caught:
        ask(process, do)
    assert caught.value.trying == "64x64"
    assert not alive(process.pid)
    with pytest.raises(DeadError, match="ends its process: status -9") as caught:
        ask(started(), "os.kill(os.getpid(), 9)")  # it says nothing
    assert caught.value.trying == ""


def test_what_comes_before_an_end_counts(started):
    """An answer that it still gave is an answer; the next question has none."""
    process = started()
    assert ask(process, "say(ready=True); os._exit(0)") == {"ready": True}
    with pytest.raises(DeadError, match="ends its process"):
        ask(process, "say(ready=True)")


def test_rubbish_is_an_end(started):
    process = started()
    with pytest.raises(DeadError):
        ask(process, "print('no JSON', flush=True)", 5.0)
    assert not alive(process.pid)


def test_a_candidate_that_hangs_is_named(started):
    process, start = started(1.0), time.monotonic()
    with pytest.raises(DeadError, match="hangs") as caught:
        ask(process, "say(trying='a'); say(trying='b'); time.sleep(600)")
    assert caught.value.trying == "b"
    assert time.monotonic() - start < 60
    assert not alive(process.pid)


def test_each_candidate_has_its_own_patience(started):
    do = "[(say(trying=str(i)), time.sleep(0.6)) for i in range(4)]; say(figures={})"
    assert ask(started(2.0), do) == {"figures": {}}


@pytest.mark.parametrize("trying", ["", "say(trying='a'); "])
def test_no_time_left_accuses_no_candidate(trying, started):
    process = started()
    ask(process, "say(ready=True)")
    with pytest.raises(DeadError, match="no time left") as caught:
        ask(process, f"{trying}time.sleep(600)", 0.3)
    assert caught.value.trying == ""
    assert not alive(process.pid)


def test_to_end_takes_no_time(started):
    process = started()
    process._send({"do": "signal = __import__('signal'); signal.signal(15, signal.SIG_IGN)"})
    process._send({"do": "time.sleep(600)"})
    start = time.monotonic()
    process.end()
    assert time.monotonic() - start < 30
    assert not alive(process.pid)


def test_the_users_logs_and_traces_are_not_its_own(started, monkeypatch):
    for name in ("TORCH_LOGS", "TORCH_TRACE", "CODA_DEBUG"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CODA_CACHE_DIR", "/somewhere")
    do = "say(env=sorted(os.environ))"
    names = ask(started(), do)["env"]
    assert not {"TORCH_LOGS", "TORCH_TRACE", "CODA_DEBUG"} & set(names)
    assert "CODA_CACHE_DIR" in names


def test_an_interrupt_of_the_terminal_is_not_for_it(started):
    process = started()
    assert ask(process, "say(group=os.getpgrp())")["group"] == process.pid != os.getpgrp()


#: Starts one that reads no input and never ends by itself, says its pid, and waits.
PARENT = """
import sys, time
from coda_inductor.tune import client
start = {start!r}.partition("for line in")[0]
process = client.Process(0, start + "say(ready=True)\\nwhile True: time.sleep(9)")
process.ask({{}}, time.monotonic() + 60)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_parent():
    code = PARENT.format(start=START)
    env = os.environ | {"PYTHONPATH": str(Path(client.__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    try:
        pid = int(parent.stdout.readline())
        assert alive(pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    until(lambda: not alive(pid), 10)
