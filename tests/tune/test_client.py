# SPDX-License-Identifier: Apache-2.0
"""A candidate that hangs or ends the measuring process is named. That one here does as it is
told."""

from __future__ import annotations

import time

import pytest
from processes import alive, told

from coda_inductor.tune import client
from coda_inductor.tune.client import DeadError, Process


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Start such a process; it is ended after the test."""
    monkeypatch.setattr(client, "_MODULE", told(tmp_path, monkeypatch))
    made: list[Process] = []

    def start(patience: float = 20.0) -> Process:
        made.append(Process(3, patience))
        return made[-1]

    yield start
    for process in made:
        process.end()
    assert not any(alive(process.pid) for process in made)


def ask(process: Process, do: str, seconds: float = 20.0) -> dict:
    return process.ask({"do": do}, time.monotonic() + seconds)


def test_it_answers(started):
    process = started()
    assert not process.answered
    assert ask(process, "say(index=arguments)") == {"index": ["3"]}
    assert process.answered
    tried = "say(trying='a'); say(trying='b'); say(figures={'us': 1.5})"
    assert ask(process, tried) == {"figures": {"us": 1.5}}


@pytest.mark.parametrize("trying", ["", "64x64"])
def test_one_that_ends_its_process_is_named(trying, started):
    process = started()
    do = f"{trying!r} and say(trying={trying!r}); os._exit(3)"
    with pytest.raises(DeadError, match="ends its process: status 3") as caught:
        ask(process, do)
    assert caught.value.trying == trying
    assert process.answered is bool(trying)


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
