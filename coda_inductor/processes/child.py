# SPDX-License-Identifier: Apache-2.0
"""The parent's side of one of our processes: start, ask, end.

The process is a separate program (``start``), not a child of ``multiprocessing``: that would
re-import ``__main__``, share one fork server with the user's own processes, and join it when the
interpreter exits. It ends with this process, and imports nothing from the current folder.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coda_inductor.processes.start import Messages

_PROGRAM = Path(__file__).with_name("start.py")
#: Seconds to wait for a killed process; one in a driver's call may take longer.
_PATIENCE = 2.0
#: Variables for logs and traces: only the user's process should write its files.
_NOT_ITS = ("TORCH_LOGS", "TORCH_TRACE", "CODA_DEBUG")
#: Packages that the child imports from the same place, even from the current folder (a checkout).
_NEEDED = ("torch", "sympy")


class Child:
    """A process that runs ``main(connection, *arguments)`` of ``module``. ``environment``:
    variables in addition to this process's. ``connection``: the connection to it, for other uses
    than :meth:`ask`. Raises OSError if it cannot be started."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None):
        local, remote = socket.socketpair()
        self.connection = Messages(local.detach())
        self._lock = threading.Lock()
        self._last_words = ""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in ``end``)
        command = [sys.executable, "-I", *(["-B"] if sys.dont_write_bytecode else [])]
        command += [str(_PROGRAM), str(os.getpid()), module, *arguments]
        variables = {k: v for k, v in os.environ.items() if k not in _NOT_ITS}
        with remote:
            self._process = subprocess.Popen(  # noqa: S603 (our own module)
                command, stdin=remote.fileno(), stdout=self._output, stderr=subprocess.STDOUT,
                env={**variables, **(environment or {})},
                start_new_session=True,  # a group to kill, which a terminal's Ctrl-C does not reach
            )  # fmt: skip
        self.pid = self._process.pid
        self._send(import_path())

    def ask(self, message: Any, deadline: float) -> Any:
        """The child's answer to ``message``, by ``deadline`` (of ``time.monotonic``). Raises
        ChildProcessError if it ended without an answer, with its last line or its exit status, and
        TimeoutError if it did not answer in time, and was killed."""
        self._send(message)
        return self.answer(deadline)

    def answer(self, deadline: float) -> Any:
        """The child's next message. Raises as :meth:`ask`."""
        try:
            if self.connection.poll(max(0.0, deadline - time.monotonic())):
                return self.connection.recv()
        except (EOFError, OSError, ValueError):  # it ended, or sent invalid data
            raise ChildProcessError(self.end()) from None
        self.end()
        raise TimeoutError

    def end(self) -> str:
        """Kill the child and all that it started. Returns its last line, or its exit status."""
        with self._lock:
            if not self._output.closed:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PATIENCE)
                self._output.seek(0)
                lines = self._output.read().decode(errors="replace").strip().splitlines()
                status = f"status {self._process.returncode}"
                self._last_words = lines[-1][:200] if lines else status
                self._output.close()
            return self._last_words

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended: reading the answer shows that
            self.connection.send(message)


def import_path() -> list[str]:
    """``sys.path`` without the current folder, whose files are data, not a library. Import ignores
    entries that are not text, such as a ``pathlib.Path``."""
    folder = None
    with contextlib.suppress(FileNotFoundError):  # it was removed
        folder = os.path.realpath(os.getcwd())
    entries: list[Any] = sys.path
    texts = [p for p in entries if isinstance(p, str)]
    paths = [p for p in texts if os.path.isabs(p) and os.path.realpath(p) != folder]
    modules = [sys.modules[name] for name in _NEEDED if name in sys.modules]
    roots = [str(Path(str(module.__file__)).absolute().parents[1]) for module in modules]
    return list(dict.fromkeys([*paths, *roots]))
