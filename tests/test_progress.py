# SPDX-License-Identifier: Apache-2.0
"""What takes long shows a line on a terminal, and nowhere else."""

import contextlib
import io
import time
from concurrent.futures import Future

import pytest

from coda_inductor import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(progress, "AFTER", 0.05)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("LOCAL_RANK", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def work(terminal: Terminal, seconds: float) -> None:
    futures: list[Future] = [Future(), Future()]
    with contextlib.redirect_stderr(terminal), progress.show_progress("compiling kernels", futures):
        futures[0].set_result(None)
        time.sleep(seconds)


@pytest.mark.parametrize("case", ["short", "log", "rank"])
def test_else_nothing_is_said(case, terminal, monkeypatch):
    if case == "log":
        monkeypatch.setattr(Terminal, "isatty", lambda _: False)
    if case == "rank":
        monkeypatch.setenv("LOCAL_RANK", "1")
    work(terminal, 0.0 if case == "short" else 0.2)
    assert terminal.getvalue() == ""


def test_of_two_at_a_time_one_is_shown_and_both_end(terminal):
    with contextlib.redirect_stderr(terminal), progress.show_progress("measuring", [Future()]):
        work(terminal, 0.2)
        assert "compiling" not in terminal.getvalue()
    work(terminal, 0.5)
    assert "coda: compiling kernels" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()  # how much is done
