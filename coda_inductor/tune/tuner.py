# SPDX-License-Identifier: Apache-2.0
"""Measure sites while a graph is compiled, within a budget of seconds.

Kernels are compiled side by side in the compile pool while the measuring process starts and
compiles the unfused candidates. What one process has measured, all that share its cache know.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coda_inductor.log import logger, warn_once
from coda_inductor.runtime import pool
from coda_inductor.runtime.launch import requests
from coda_inductor.runtime.worker import KernelRequest
from coda_inductor.select.config import Config
from coda_inductor.select.figures import Figures, from_row, key_of
from coda_inductor.select.site import Site
from coda_inductor.select.store import Device, Store
from coda_inductor.tune import inputs, lock, rank
from coda_inductor.tune.client import DeadError, Process
from coda_inductor.tune.worker import site_text

#: Seconds beyond its own budget that a process waits for another one that is measuring.
_SLACK = 30.0
#: Part of the GPU's free memory that a measurement may take.
_ROOM = 0.8


class Tuner:
    """Measures on ``device`` for at most ``seconds`` in all, into ``store``.

    Attributes:
        most: configs a site; None for all legal ones.
        left: sites that there was no time for.
    """

    def __init__(self, store: Store, device: torch.device, seconds: float, most: int | None):
        self.store, self.most = store, most
        self.left: dict[str, Site] = {}
        self._device = device
        self._seconds = seconds
        self._process: Process | None = None

    def measure(self, sites: Sequence[Site]) -> bool:
        """Measure those of ``sites`` that were not; True if any of them now is. Takes no longer
        than what is left of the budget, and as long again if another process is measuring."""
        wanted = {key_of(s): s for s in sites if self.store.find(s) is None}
        wanted = {key: site for key, site in wanted.items() if key not in self.left}
        if not wanted:
            return False
        start = time.monotonic()
        self._submit(wanted.values())
        with lock.held(self.store.path, self._seconds + _SLACK) as got:
            waited = time.monotonic() - start
            missing = {k: s for k, s in wanted.items() if self.store.find(s) is None}
            if not got or (waited > 1.0 and self._given_up(missing)):
                self.left |= missing
            else:
                self._measure_all(missing, time.monotonic() + self._seconds)
                self._seconds -= time.monotonic() - start - waited
        return len(self.left.keys() & wanted) < len(wanted)

    def close(self) -> None:
        """End the measuring process: it holds memory of the GPU."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _submit(self, sites) -> None:
        """Start compiling what will be timed."""
        pool.submit([r for site in sites for c in self._configs(site) for r in _requests(site, c)])

    def _configs(self, site: Site) -> list[Config]:
        return rank.candidates(site, self.store.gpu, self.most)

    def _measure_all(self, sites: dict[str, Site], deadline: float) -> None:
        order = sorted(sites, key=lambda key: -sites[key].m * sites[key].n * sites[key].k)
        try:
            self._prepare([sites[key] for key in order], deadline)
            with _progress(len(order)) as progress:
                for key in order:
                    if (found := self._measured(sites[key], deadline)) is None:
                        self.left[key] = sites[key]
                    else:
                        self.store.add({key: found})
                    progress.advance(progress.task_ids[0])
        except Exception as error:  # never in the way: what is not measured is modelled
            logger.debug("tuning failed", exc_info=True)
            warn_once("tuning", f"it failed: {error!r}", to="expected times")
        self.left |= {k: s for k, s in sites.items() if self.store.find(s) is None}

    def _prepare(self, sites: list[Site], deadline: float) -> None:
        """Let the measuring process compile the unfused candidates, while kernels are compiled."""
        if self.store.device is None:
            about = self._ask({"device": True}, deadline).get("device")
            if about is not None:
                self.store.add({}, Device(**about))
        for site in sites:
            if self._fits(site):
                self._ask({"site": site_text(site)}, deadline)

    def _measured(self, site: Site, deadline: float) -> Figures | None:
        """What ``site`` takes; None where that cannot be said."""
        if not self._fits(site):
            return None
        failed: dict[str, str] = {}
        wanted = {str(c): _requests(site, c) for c in self._configs(site)}
        left = max(0.0, deadline - time.monotonic())
        errors = pool.wait([r for group in wanted.values() for r in group], timeout=left)
        for config, group in wanted.items():
            whys = [why for r in group if (why := errors[r]) is not None]
            if whys:
                failed[config] = f"does not compile: {whys[0]}"[:200]
        while configs := [c for c in wanted if c not in failed]:
            if time.monotonic() > deadline:
                return None
            try:
                answer = self._ask({"site": site_text(site), "configs": configs}, deadline)
            except DeadError as error:
                if not error.trying:
                    return None
                failed[error.trying] = str(error)
                continue
            if "figures" not in answer:
                logger.debug("%s was not measured: %s", key_of(site), answer.get("error"))
                return None
            _, found = from_row({"key": "", **answer["figures"]})
            late = {c: w for c, w in failed.items() if "took too long" not in w}
            return Figures(
                found.us, found.unfused, found.plain, found.spread,
                {**found.failed, **late}, site.m, site.name,
            )  # fmt: skip
        return None

    def _ask(self, message: dict, deadline: float) -> dict:
        if self._process is None:
            self._process = Process(self._device.index)
        try:
            return self._process.ask(message, deadline)
        except DeadError:
            self._process = None
            raise

    def _fits(self, site: Site) -> bool:
        free, _ = torch.cuda.mem_get_info(self._device)
        return inputs.size(site) < _ROOM * free

    def _given_up(self, missing: dict[str, Site]) -> bool:
        """Was another rank of this job measuring until now, and had no time for these? Then this
        one must not measure them either: all ranks run the same kernels."""
        return bool(missing) and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _requests(site: Site, config: Config) -> list[KernelRequest]:
    as_, bs, _ = inputs.tensors(site, "meta")
    return requests(as_, bs, site.program.to_json(), str(config))


def _progress(count: int) -> Progress:
    """A bar on a terminal; nothing in a log."""
    console = Console(stderr=True)
    columns = (
        TextColumn("coda: measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task("", total=count)
    return bar
