# SPDX-License-Identifier: Apache-2.0
"""Measure sites while a graph is compiled, within a budget of seconds.

Kernels are compiled side by side in the compile pool while the measuring processes start and
compile the unfused candidates; only one of them times at a time. What one process has measured, all
that share its cache know.
"""

from __future__ import annotations

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
from coda_inductor.processes.child import Child, EndedError, LateError
from coda_inductor.progress import shown
from coda_inductor.runtime import pool
from coda_inductor.runtime.client import workers
from coda_inductor.runtime.launch import requests
from coda_inductor.runtime.worker import KernelRequest
from coda_inductor.select import roofline
from coda_inductor.select.choice import candidates
from coda_inductor.select.config import Config
from coda_inductor.select.figures import Figures, from_row, key_of, signature
from coda_inductor.select.site import Site, site_text
from coda_inductor.select.store import Store
from coda_inductor.tune import inputs

_WORKER = "coda_inductor.tune.worker"
#: Seconds that measuring takes: in a process where nobody asked for it, for a graph where somebody
#: did.
BY_DEFAULT, ASKED = 8.0, 60.0
#: Seconds beyond its own budget that a process waits for another one that is measuring.
_SLACK = 30.0
#: Seconds that one candidate may take before it counts as hanging: its kernel is compiled, so that
#: it only has to be loaded and run.
_PATIENCE = 20.0
#: Measuring processes at most. Each holds half a GiB of the GPU's memory.
_MOST = 4
_LATE = "no time left to compile it"
#: Part of the GPU's free memory that a measurement may take.
_ROOM = 0.8


class DeadError(Exception):
    """The measuring process ended, or was ended: it had no answer in time. ``trying``: what it was
    at."""

    def __init__(self, why: str, trying: str = ""):
        super().__init__(why)
        self.trying = trying


_spent = 0.0


def spare() -> float:
    """Seconds that this process may still measure though nobody asked for it: none before a compile
    server works, for without it and processes that measure, which start for as long, nothing would
    be found; none in one of several ranks, which are to run the same kernels."""
    return 0.0 if _others() or not pool.serving() else max(0.0, BY_DEFAULT - _spent)


class Tuner:
    """Measures on ``device`` for at most ``seconds`` in all, into ``store``.

    Attributes:
        most: configs a site; None for all legal ones.
        left: sites that there was no time for.
    """

    def __init__(
        self, store: Store, device: torch.device, seconds: float, most: int | None,
        start: Callable[..., Child] = Child, compiler: Any = pool,
    ):  # fmt: skip
        self.store, self.most = store, most
        self._start, self._compiler = start, compiler
        self.left: dict[str, Site] = {}
        self._device = device
        self._seconds = seconds
        self._processes: dict[int, Child] = {}  # by thread
        self._answered: set[Child] = set()
        self._hopeless = ""  # why no process can work here

    def measure(self, sites: Sequence[Site]) -> bool:
        """Measure those of ``sites`` that were not; True if any of them now is. Takes no longer
        than what is left of the budget, and as long again if another process is measuring."""
        global _spent
        often = Counter(map(key_of, sites))
        order = sorted(sites, key=lambda s: -often[key_of(s)] * self._gain(s))
        wanted = {key_of(s): s for s in order if self.store.find(s) is None}
        wanted = {key: site for key, site in wanted.items() if key not in self.left}
        if not wanted or self._seconds <= 0:
            self.left |= wanted
            return False
        start = time.monotonic()
        with locks.held(self.store.path, self._seconds + _SLACK) as got:
            waited = time.monotonic() - start
            missing = {k: s for k, s in wanted.items() if self.store.find(s) is None}
            if got and not (waited > 1.0 and _others()):
                self._measure_all(missing, time.monotonic() + self._seconds)
                took = time.monotonic() - start - waited
                self._seconds, _spent = self._seconds - took, _spent + took
            # Else another rank was measuring until now, and had no time for what is missing. Then
            # this one must not measure it either: all ranks run the same kernels.
        self.left |= {key: s for key, s in wanted.items() if self.store.find(s) is None}
        return len(self.left.keys() & wanted) < len(wanted)

    def close(self) -> None:
        """End the measuring processes: they hold memory of the GPU. Note what is left."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()
        if self.left:
            self.store.leave(self.left.values())

    def _gain(self, site: Site) -> float:
        """Microseconds that its kernel is expected to save."""
        gpu = self.store.gpu
        unfused = roofline.products_us(site, gpu) + roofline.around_us(site, gpu)
        return unfused - roofline.fused_us(site, gpu)

    def _configs(self, site: Site) -> list[Config]:
        return candidates(site, self.store.gpu, self.store.nearest(site))[: self.most]

    def _measure_all(self, sites: dict[str, Site], deadline: float) -> None:
        """In their order. Several processes: while one compiles what is not fused, which takes
        longer than to time it, another one times."""
        try:
            kernels = [r for site in sites.values() for c in self._configs(site)
                       for r in _requests(site, c)]  # fmt: skip
            self._compiler.submit(kernels)
            with concurrent.futures.ThreadPoolExecutor(_processes()) as threads:
                found = {key: threads.submit(self._measured, site, deadline)
                         for key, site in sites.items()}  # fmt: skip
                with shown("measuring", [*found.values()]):
                    for key, future in found.items():
                        if (figures := future.result()) is not None:
                            self._keep({key: figures})
            self._compiler.drop(kernels)  # nobody waits for what there was no time for
        except Exception as error:  # never in the way: what is not measured is estimated
            logger.debug("tuning failed", exc_info=True)
            warn_once("tuning", f"it failed: {error!r}", to="expected times")

    def _keep(self, found: dict[str, Figures]) -> None:
        try:
            self.store.add(found)
        except OSError as error:
            warn_once("measurements", f"they cannot be kept: {error}", to="this process's memory")

    def _measured(self, site: Site, deadline: float) -> Figures | None:
        """What ``site`` takes; None where that cannot be said."""
        text = site_text(site)
        try:
            if not self._fits(site) or "ready" not in self._ask({"site": text}, deadline):
                return None
            wanted = {str(c): _requests(site, c) for c in self._configs(site)}
            failed = _uncompiled(wanted, deadline, self._compiler)
            while True:
                configs = [c for c in wanted if c not in failed]
                if not configs and _LATE in failed.values():
                    return None  # else: that none works is a result as well
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
                _, found = from_row({"key": "", **answer["figures"]})
                known = {c: why for c, why in failed.items() if why != _LATE}
                return replace(
                    found,
                    failed={**found.failed, **known},
                    name=site.name,
                    like=signature(site.program),
                )
        except Exception as error:  # it costs this site alone
            logger.debug("%s was not measured: %r", key_of(site), error)
            return None

    def _ask(self, message: dict, deadline: float) -> dict:
        """The answer of this thread's process to ``message``. A candidate that it announces has
        some seconds; what ends the process costs the candidate that it was at."""
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
        except EndedError as error:
            dead = DeadError(f"ends its process: {error}", trying)
        except LateError:
            dead = DeadError("hangs", trying) if limit < deadline else DeadError("no time left")
        del self._processes[thread]
        if process not in self._answered and time.monotonic() < deadline:
            # A GPU that takes no second process, say: the next one would die as well.
            self._hopeless = str(dead)
            warn_once("tuning", f"its process {dead}", to="expected times")
        raise dead

    def _fits(self, site: Site) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        return inputs.size(site) * _processes() < _ROOM * free


def _uncompiled(
    wanted: dict[str, list[KernelRequest]], deadline: float, compiler: Any
) -> dict[str, str]:
    """Why a config has no kernel, for those that have none."""
    left = max(0.0, deadline - time.monotonic())
    errors = compiler.wait([r for group in wanted.values() for r in group], timeout=left)
    failed = {}
    for config, group in wanted.items():
        whys = [why for request in group if (why := errors[request]) is not None]
        if whys:
            late = "took too long" in whys[0]
            failed[config] = _LATE if late else f"does not compile: {whys[0]}"[:200]
    return failed


def _processes() -> int:
    return max(1, min(_MOST, workers() // 4))


def _others() -> bool:
    """Is this one of several ranks?"""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _requests(site: Site, config: Config) -> list[KernelRequest]:
    as_, bs, _ = inputs.tensors(site, "meta")
    return requests(as_, bs, site.program.to_json(), str(config))
