# SPDX-License-Identifier: Apache-2.0
"""Real processes that share one store; what measures for them is none."""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path

from measured import HOPPER, site

from coda_inductor.select.figures import key_of
from coda_inductor.select.store import Store

SITES = [site(kind, m=m) for kind in ("scale", "rms_partial") for m in (512, 2048, 8192)]


def _rank(number: int, path: list[str], folder: str, ready, start) -> None:
    """Measure all sites; write down which were asked for, and what was left."""
    sys.path[:] = path
    import pytest
    from fake_tuning import Machine, install, tuner_of

    machine = Machine()
    log = Path(folder) / f"asked.{number}"

    def answers(message):
        if "configs" in message:
            time.sleep(0.05)

    machine.answers = answers
    with pytest.MonkeyPatch.context() as patch:
        install(patch, machine)

        ready.put(number)
        start.wait(60)
        order = SITES if number % 2 else SITES[::-1]
        tuner = tuner_of(Path(folder))
        for wanted in (order[:3], order):
            tuner.measure(wanted)
        tuner.close()
    log.write_text("\n".join([*machine.measured, *(f"left {key}" for key in tuner.left)]))


def test_together_they_measure_each_site_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, start = context.Queue(), context.Event()
    ranks = [
        context.Process(target=_rank, args=(number, sys.path, str(tmp_path), ready, start))
        for number in range(2)
    ]
    for rank in ranks:
        rank.start()
    for _ in ranks:
        ready.get(timeout=120)
    start.set()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    said = [(tmp_path / f"asked.{number}").read_text().splitlines() for number in range(2)]
    assert sorted(said[0] + said[1]) == sorted(map(key_of, SITES))
    assert set(Store(HOPPER, tmp_path).own()) == set(map(key_of, SITES))
