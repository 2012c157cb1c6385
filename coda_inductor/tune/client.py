# SPDX-License-Identifier: Apache-2.0
"""The measuring process as this one sees it: started, asked, ended. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from coda_inductor.runtime.client import import_path

#: Seconds that one candidate may take before it counts as hanging: its kernel is compiled, so that
#: it only has to be loaded and run.
PATIENCE = 20.0
_GRACE = 2.0
#: The user's process logs and traces, into its own files.
_NOT_ITS = ("TORCH_LOGS", "TORCH_TRACE", "CODA_DEBUG")
_START = """
import json, os, sys, threading, time

def watch(parent=os.getppid()):  # it ends with its parent, whatever it waits for
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)

threading.Thread(target=watch, daemon=True).start()
sys.path[:] = json.loads(sys.stdin.readline())
from coda_inductor.tune.worker import main
main(int(sys.argv[1]))
"""


class DeadError(Exception):
    """The process ended, or was ended: it had no answer in time. ``trying``: what it was at."""

    def __init__(self, why: str, trying: str):
        super().__init__(why)
        self.trying = trying


class Process:
    """A measuring process for the CUDA device ``index``: Python runs ``program``, and a candidate
    hangs that takes more than ``patience`` seconds.

    Raises OSError if none can be started.
    """

    def __init__(self, index: int, program: str = _START, patience: float = PATIENCE):
        self._patience, self.answered = patience, False  # it never has so far
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed in ``end``)
        self._process = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-I", "-c", program, str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={k: v for k, v in os.environ.items() if k not in _NOT_ITS},
            start_new_session=True,  # a terminal's Ctrl-C is not for it
            text=True,
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="coda tuning", daemon=True).start()
        package = str(Path(__file__).parents[2])
        self._send([*(path for path in import_path() if path != package), package])

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The answer to ``message``, by ``deadline`` (of ``time.monotonic``).

        Raises:
            DeadError: there is none; the process is no more.
        """
        self._send(message)
        trying = ""
        while True:
            left = deadline - time.monotonic()
            wait = min(left, self._patience) if trying else left
            try:
                answer = self._answers.get(timeout=max(0.0, wait))
            except queue.Empty:
                self.end()
                hangs = trying and wait < left
                raise DeadError(
                    "hangs" if hangs else "no time left", trying if hangs else ""
                ) from None
            if answer is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE)
                said = self._tail()
                self.end()
                raise DeadError(f"ends its process: {said}", trying)
            self.answered = True
            if "trying" not in answer:
                return answer
            trying = answer["trying"]

    def end(self) -> None:
        """End it, at once; takes at most some seconds."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._said.close()

    def _tail(self) -> str:
        """The last line that it wrote, or how it ended."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else f"status {self._process.returncode}"

    def _send(self, message: Any) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended: its answers say so
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):
            for line in pipe:
                self._answers.put(json.loads(line))
        self._answers.put(None)
