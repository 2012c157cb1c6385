# SPDX-License-Identifier: Apache-2.0
"""A measuring process that measures nothing, and what a tuner needs beside it."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measured import HOPPER, figures

from coda_inductor.lowering import driver
from coda_inductor.select.figures import key_of, to_row
from coda_inductor.select.measurements import Measurements
from coda_inductor.select.site import site_from
from coda_inductor.tune import tuner

CUDA = torch.device("cuda", 0)


class Machine:
    """What stands for the GPU.

    Attributes:
        said: (number of the process, message), of all processes.
        dies: config -> what a process raises at it.
        answers: what takes the place of an answer: called with a message, None for the usual one.
        uncompiled: config -> why it has no kernel.
    """

    def __init__(self):
        self.said: list[tuple[int, dict[str, Any]]] = []
        self.dies: dict[str, Exception] = {}
        self.waited: list[float] = []
        self.uncompiled: dict[str, str] = {}
        self.takes_no_process = False
        self.ended: list[int] = []
        self.answers: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda _: None
        self.submitted: list[Any] = []
        self.dropped: list[Any] = []
        self.numbers = itertools.count()
        self.busy = self.most = 0

    @property
    def measured(self) -> list[str]:
        """Keys of the sites that were measured, as often as they were asked for."""
        return [key_of(site_from(m["site"])) for _, m in self.said if "configs" in m]

    @property
    def started(self) -> int:
        return len({number for number, _ in self.said})

    def tuner(self, folder: Path, seconds: float = 60.0) -> tuner.Tuner:
        store = Measurements(HOPPER, folder)
        return tuner.Tuner(store, CUDA, seconds, self.process, self)

    def process(self, module: str, index: str) -> "Process":
        assert (module, index) == ("coda_inductor.tune.worker", str(CUDA.index))
        return Process(self)

    def wait(self, wanted: list[Any], timeout: float) -> dict[Any, str | None]:
        return {request: self.uncompiled.get(request.config) for request in wanted}

    def submit(self, wanted: list[Any]) -> None:
        self.submitted += wanted

    def drop(self, wanted: list[Any]) -> None:
        self.dropped += wanted


class Process:
    """As ``processes.child.Child``."""

    def __init__(self, machine: Machine):
        self.machine, self.number = machine, next(machine.numbers)
        machine.busy += 1
        machine.most = max(machine.most, machine.busy)

    def ask(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        self.machine.said.append((self.number, message))
        if time.monotonic() > deadline:
            self._dies(TimeoutError())
        if self.machine.takes_no_process:
            self._dies(ChildProcessError("all CUDA-capable devices are busy"))
        if (answer := self.machine.answers(message)) is not None:
            return answer
        if "configs" not in message:
            return {"ready": True}
        self.answers = self._measures(message)
        return next(self.answers)

    def answer(self, deadline: float) -> dict[str, Any]:
        self.machine.waited.append(deadline - time.monotonic())
        return next(self.answers)

    def _measures(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for config in message["configs"]:
            yield {"trying": config}
            if config in self.machine.dies:
                self._dies(self.machine.dies[config])
        us = {config: 50.0 + i for i, config in enumerate(message["configs"])}
        yield {"figures": to_row("", figures(us, m=message["site"]["m"]))}

    def _dies(self, error: Exception) -> None:
        self.end()
        raise error

    def end(self) -> None:
        assert self.number not in self.machine.ended
        self.machine.ended.append(self.number)
        self.machine.busy -= 1


def install(patch, machine: Machine, processes: int = 2) -> None:
    """Let what tunes by itself measure with ``machine``, in so many processes."""
    made = functools.partial(tuner.Tuner, start=machine.process, compiler=machine)
    patch.setattr(driver, "Tuner", made)
    patch.setenv("CODA_COMPILE_WORKERS", str(4 * processes))
    patch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
