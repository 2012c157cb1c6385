# SPDX-License-Identifier: Apache-2.0
"""The measuring process as this one sees it. Every wait has a deadline."""

from __future__ import annotations

import time
from typing import Any

from coda_inductor.processes.child import Child, EndedError, LateError

#: Seconds that one candidate may take before it counts as hanging: its kernel is compiled, so that
#: it only has to be loaded and run.
PATIENCE = 20.0
_MODULE = "coda_inductor.tune.worker"


class DeadError(Exception):
    """The process ended, or was ended: it had no answer in time. ``trying``: what it was at."""

    def __init__(self, why: str, trying: str):
        super().__init__(why)
        self.trying = trying


class Process(Child):
    """A measuring process for the CUDA device ``index``; a candidate hangs that takes more than
    ``patience`` seconds.

    Raises OSError if none can be started.
    """

    def __init__(self, index: int, patience: float = PATIENCE):
        super().__init__(_MODULE, str(index))
        self._patience, self.answered = patience, False  # it never has so far

    def ask(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The answer to ``message``, by ``deadline`` (of ``time.monotonic``).

        Raises:
            DeadError: there is none; the process is no more.
        """
        trying, limit = "", deadline
        try:
            answer = super().ask(message, deadline)
            while "trying" in answer:
                self.answered = True
                trying = answer["trying"]
                limit = min(deadline, time.monotonic() + self._patience)
                answer = self.answer(limit)
        except EndedError as error:
            raise DeadError(f"ends its process: {error}", trying) from None
        except LateError:
            if limit < deadline:
                raise DeadError("hangs", trying) from None
            raise DeadError("no time left", "") from None
        self.answered = True
        return answer
