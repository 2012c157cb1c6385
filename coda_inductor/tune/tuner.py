# SPDX-License-Identifier: Apache-2.0
"""Measure sites while a graph is compiled, within a budget of seconds. Kernels are compiled in the
compile pool while the measuring processes start and compile the unfused candidates; only one of
them measures at a time. All processes that share a cache share the measurements."""

import concurrent.futures
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from coda_inductor import locks
from coda_inductor.log import logger, warn_once
from coda_inductor.processes.child import Child
from coda_inductor.runtime import pool
from coda_inductor.runtime.compiler import KernelRequest
from coda_inductor.runtime.launch import requests
from coda_inductor.select import roofline
from coda_inductor.select.choice import MANY, candidates
from coda_inductor.select.config import Config
from coda_inductor.select.figures import Figures, from_row, key_of, signature
from coda_inductor.select.measurements import Measurements
from coda_inductor.select.site import Site, site_text
from coda_inductor.tune import inputs

_WORKER = "coda_inductor.tune.worker"
#: Seconds after its own budget that a process waits for another one that is measuring.
_SLACK = 30.0
#: Seconds after which a candidate hangs: its kernel is compiled, and only to be loaded and run.
_PATIENCE = 20.0
#: The most measuring processes. Each holds half a GiB of the GPU's memory.
_MOST = 4
_LATE = "no time left to compile it"
#: Part of the GPU's free memory that a measurement may take.
_ROOM = 0.8


class DeadError(Exception):
    """The measuring process ended, or was killed because it did not answer in time. ``trying``: the
    candidate that it was running."""

    def __init__(self, why: str, trying: str = ""):
        super().__init__(why)
        self.trying = trying


class Tuner:
    """Measures sites on ``device`` for at most ``seconds`` in all; the results go to ``store``.
    ``left``: keys of the sites for which there was no time."""

    def __init__(
        self, store: Measurements, device: torch.device, seconds: float,
        start: Callable[..., Child] = Child, compiler: Any = pool,
    ):  # fmt: skip
        self.store, self._start, self._compiler = store, start, compiler
        self.left: set[str] = set()
        self._device = device
        self._seconds = seconds
        self._processes: dict[int, Child] = {}  # by thread
        self._answered: set[Child] = set()
        self._hopeless = ""  # why no process works here

    def measure(self, sites: Sequence[Site]) -> bool:
        """Measure the ``sites`` that have no measurement. Returns True if any has one now. Takes at
        most the rest of the budget, and as long again if another process is measuring."""
        counts = Counter(map(key_of, sites))
        order = sorted(sites, key=lambda s: -counts[key_of(s)] * self._gain(s))
        by_key = {key_of(s): s for s in order if self.store.find(s) is None}
        by_key = {key: site for key, site in by_key.items() if key not in self.left}
        if not by_key or self._seconds <= 0:
            self.left |= by_key.keys()
            return False
        start = time.monotonic()
        with locks.lock_file(self.store.path, self._seconds + _SLACK) as got:
            waited = time.monotonic() - start
            missing = {k: s for k, s in by_key.items() if self.store.find(s) is None}
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            if got and not (waited > 1.0 and ranks > 1):
                self._measure_all(missing, time.monotonic() + self._seconds)
                self._seconds -= time.monotonic() - start - waited
            # Else another rank was measuring until now and had no time for the missing ones. Then
            # this one must not measure them either: all ranks run the same kernels.
        self.left |= {key for key, s in by_key.items() if self.store.find(s) is None}
        return not by_key.keys() <= self.left

    def close(self) -> None:
        """End the measuring processes, which hold GPU memory."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _gain(self, site: Site) -> float:
        gpu = self.store.gpu
        unfused = roofline.products_us(site, gpu) + roofline.around_us(site, gpu)
        return unfused - roofline.fused_us(site, gpu)

    def _configs(self, site: Site) -> list[Config]:
        return candidates(site, self.store.gpu, self.store.nearest(site))[:MANY]

    def _measure_all(self, sites: dict[str, Site], deadline: float) -> None:
        """Measure ``sites`` in order. With several processes, one measures while another compiles
        the unfused candidate, which takes longer than its measurement."""
        try:
            kernels = [r for site in sites.values() for c in self._configs(site)
                       for r in _requests(site, c)]  # fmt: skip
            self._compiler.submit(kernels)
            with concurrent.futures.ThreadPoolExecutor(_processes()) as threads:
                found = threads.map(lambda s: self._measure_site(s, deadline), sites.values())
                for key, figures in zip(sites, found, strict=True):
                    if figures is not None:
                        self._keep({key: figures})
            self._compiler.drop(kernels)  # there was no time for the rest
        except Exception as error:  # must not stop a compilation: estimates are used instead
            logger.debug("tuning failed", exc_info=True)
            warn_once("tuning", f"it failed: {error!r}", to="expected times")

    def _keep(self, figures: dict[str, Figures]) -> None:
        try:
            self.store.add(figures)
        except OSError as error:
            warn_once("measurements", f"they cannot be kept: {error}", to="this process's memory")

    def _measure_site(self, site: Site, deadline: float) -> Figures | None:
        """The measurements of ``site``; None if there are no reliable ones."""
        text = site_text(site)
        try:
            if not self._fits(site) or "ready" not in self._ask({"site": text}, deadline):
                return None
            kernels = {str(c): _requests(site, c) for c in self._configs(site)}
            failed = _compile_failures(kernels, deadline, self._compiler)
            while True:
                configs = [c for c in kernels if c not in failed]
                if not configs and _LATE in failed.values():
                    return None  # else: no working config is a result too
                try:
                    answer = self._ask({"site": text, "configs": configs}, deadline)
                except DeadError as error:
                    if not error.trying:
                        raise
                    failed[error.trying] = str(error)  # the others, in another process
                    continue
                if "figures" not in answer:
                    logger.debug("%s was not measured: %s", key_of(site), answer.get("error"))
                    return None
                _, figures = from_row({"key": "", **answer["figures"]})
                failures = {c: why for c, why in failed.items() if why != _LATE}
                failed = {**figures.failed, **failures}
                return replace(figures, failed=failed, name=site.name, like=signature(site.program))
        except Exception as error:  # only this site is lost
            logger.debug("%s was not measured: %r", key_of(site), error)
            return None

    def _ask(self, message: dict, deadline: float) -> dict:
        """The answer of this thread's process to ``message``. Each candidate that it announces may
        take some seconds; if the process ends, only the current candidate is lost."""
        thread = threading.get_ident()
        if thread not in self._processes:
            if self._hopeless or time.monotonic() > deadline:
                raise DeadError(self._hopeless or "no time left")
            self._processes[thread] = self._start(_WORKER, str(self._device.index))
        process = self._processes[thread]
        trying, limit = "", deadline
        try:
            answer = process.ask(message, deadline)
            while trying := answer.get("trying", ""):
                self._answered.add(process)
                limit = min(deadline, time.monotonic() + _PATIENCE)
                answer = process.answer(limit)
            self._answered.add(process)
            return answer
        except ChildProcessError as error:
            dead = DeadError(f"ends its process: {error}", trying)
        except TimeoutError:
            dead = DeadError("hangs", trying) if limit < deadline else DeadError("no time left")
        del self._processes[thread]
        if process not in self._answered and time.monotonic() < deadline:
            # For example, a GPU that accepts only one process: the next one would die as well.
            self._hopeless = str(dead)
            warn_once("tuning", f"its process {dead}", to="expected times")
        raise dead

    def _fits(self, site: Site) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        return inputs.size(site) * _processes() < _ROOM * free


def _compile_failures(
    kernels: dict[str, list[KernelRequest]], deadline: float, compiler: Any
) -> dict[str, str]:
    seconds = max(0.0, deadline - time.monotonic())
    errors = compiler.wait([r for group in kernels.values() for r in group], timeout=seconds)
    failed = {}
    for config, group in kernels.items():
        whys = [why for request in group if (why := errors[request]) is not None]
        if whys:
            late = "took too long" in whys[0]
            failed[config] = _LATE if late else f"does not compile: {whys[0]}"[:200]
    return failed


def _processes() -> int:
    return max(1, min(_MOST, pool.workers() // 4))


def _requests(site: Site, config: Config) -> list[KernelRequest]:
    as_, bs, _ = inputs.tensors(site, "meta")
    return requests(as_, bs, site.program.to_json(), str(config))
