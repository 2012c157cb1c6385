# SPDX-License-Identifier: Apache-2.0
"""Sites are measured once, within a budget, whatever a candidate or a process does."""

import time
from threading import Event, Thread

import pytest
import torch
from fake_tuning import Machine, install
from measured import HOPPER, figures, keyed, site

from coda_inductor import locks
from coda_inductor.select.choice import candidates
from coda_inductor.select.figures import key_of, signature
from coda_inductor.select.measurements import Measurements
from coda_inductor.tune import tuner

ONE, OTHER, THIRD = site("rms_partial"), site("scale"), site("swiglu", n=8192)
SITES = [ONE, OTHER, THIRD]


@pytest.fixture
def machine(monkeypatch, warned):
    machine = Machine()
    install(monkeypatch, machine)
    monkeypatch.setattr(tuner, "MANY", 3)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return machine


def wanted(of=ONE) -> list[str]:
    return [str(config) for config in candidates(of, HOPPER)[:3]]


def test_each_site_is_measured_once_and_kept(machine, tmp_path):
    """Only so many configs are compiled and tried."""
    mine = machine.tuner(tmp_path)
    assert mine.measure([*SITES, ONE])
    assert sorted(machine.measured) == sorted(map(key_of, SITES))
    assert not mine.measure(SITES)
    assert not machine.tuner(tmp_path).measure(SITES)
    assert len(machine.measured) == len(SITES)
    assert not mine.left
    tried = [r.config for r in machine.submitted if r.program == THIRD.program.to_json()]
    found, where = Measurements(HOPPER, tmp_path).find(THIRD)
    assert list(found.us) == list(dict.fromkeys(tried)) == wanted(THIRD)
    assert (where, found.name, found.m) == ("here", "swiglu", THIRD.m)
    assert found.like == signature(THIRD.program)


def test_the_most_gain_comes_first(machine, tmp_path, monkeypatch):
    """Of what occurs often each time counts."""
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "4")
    small, large = site(m=512), site(m=16384)
    machine.tuner(tmp_path).measure([small, large, ONE])
    machine.tuner(tmp_path / "often").measure([large, *[ONE] * 3])
    assert machine.measured == [*map(key_of, (large, ONE, small)), key_of(ONE), key_of(large)]


def test_a_config_that_does_not_compile_is_not_tried(machine, tmp_path):
    bad, *others = wanted()
    machine.uncompiled = {bad: "out of registers"}
    mine = machine.tuner(tmp_path)
    assert mine.measure([ONE])
    found, _ = mine.store.find(ONE)
    assert (list(found.us), list(found.failed)) == (others, [bad])


def test_kernels_are_not_waited_for_without_time(machine, tmp_path):
    assert not machine.tuner(tmp_path, seconds=0.0).measure([ONE])
    assert not machine.submitted
    assert machine.tuner(tmp_path).measure([ONE])
    assert machine.dropped == machine.submitted


def test_what_there_was_no_time_for_is_left(machine, tmp_path, monkeypatch):
    """And asked for no more: the budget is one graph's, not one round's."""
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "4")

    def slow(message):
        if "configs" in message:
            time.sleep(1.3)

    machine.answers = slow
    mine = machine.tuner(tmp_path, seconds=1.0)
    assert mine.measure([ONE, OTHER])
    assert machine.measured == [key_of(ONE)]
    assert mine.left == {key_of(OTHER)}
    asked = len(machine.said)
    assert not mine.measure([OTHER])
    assert not mine.measure([THIRD])
    assert mine.left == {key_of(OTHER), key_of(THIRD)}
    assert len(machine.measured) == 1
    assert asked == len(machine.said)
    assert not any(THIRD.program.to_json() == r.program for r in machine.submitted)


@pytest.mark.parametrize(
    ("error", "why"),
    [(TimeoutError(), "hangs"), (ChildProcessError("fault"), "ends its process: fault")],
)
def test_a_candidate_that_ends_its_process_ends_nothing_else(error, why, machine, tmp_path):
    good, bad, other = wanted()
    machine.dies = {bad: error}
    mine = machine.tuner(tmp_path)
    assert mine.measure([ONE])
    found, _ = mine.store.find(ONE)
    assert found.failed == {bad: why}
    assert list(found.us) == [good, other]
    tries = [(number, m["configs"]) for number, m in machine.said if "configs" in m]
    assert [configs for _, configs in tries] == [wanted(), [good, other]]
    assert all(tuner._PATIENCE - 1 < seconds < tuner._PATIENCE for seconds in machine.waited)
    machine.dies, ended = dict.fromkeys(wanted(OTHER), TimeoutError()), len(machine.ended)
    mine = machine.tuner(tmp_path, seconds=tuner._PATIENCE / 2)  # which accuses no candidate
    assert not mine.measure([OTHER])
    assert mine.store.find(OTHER) is None
    assert len(machine.ended) == ended + 1


def test_where_no_process_can_work_one_is_tried(machine, tmp_path, monkeypatch, caplog):
    """A GPU in exclusive mode: each would import for seconds and die."""
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "4")
    machine.takes_no_process = True
    mine = machine.tuner(tmp_path)
    assert not mine.measure(SITES)
    assert machine.started == 1
    assert mine.left == set(map(key_of, SITES))
    assert "devices are busy" in caplog.text
    assert not mine.measure(SITES)
    assert machine.started == 1


def test_that_no_config_works_is_a_result(machine, tmp_path):
    """Else it would be tried again by every process; that none was compiled in time is none."""
    mine, late = machine.tuner(tmp_path), machine.tuner(tmp_path)
    machine.uncompiled = dict.fromkeys(wanted(), "its compilation took too long")
    assert not late.measure([ONE])
    assert late.left == {key_of(ONE)}
    machine.uncompiled = dict.fromkeys(wanted(), "it cannot be")
    assert mine.measure([ONE])
    found, _ = mine.store.find(ONE)
    assert (dict(found.us), set(found.failed)) == ({}, set(wanted()))
    assert (found.unfused, found.plain) == (100.0, 80.0)
    assert not mine.left


@pytest.mark.parametrize("part", ["before", "site", "configs"])
def test_what_does_not_fit_is_not_measured(part, machine, tmp_path, monkeypatch):
    """Also what turns out not to."""
    small = site(m=512)

    def answers(message):
        of_one = message.get("site", {}).get("m") == ONE.m
        if of_one and ("configs" in message) == (part == "configs"):
            return {"error": "OutOfMemoryError: CUDA out of memory"}
        return None

    if part == "before":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 29, 1 << 40))
    else:
        machine.answers = answers
    mine = machine.tuner(tmp_path)
    assert mine.measure([ONE, small])
    assert (mine.store.find(ONE), mine.left) == (None, {key_of(ONE)})
    assert mine.store.find(small) is not None
    asked = len(machine.said)
    assert not mine.measure([ONE])  # not in every round again
    assert len(machine.said) == asked


def test_another_rank_does_not_measure_what_the_first_left(machine, tmp_path, monkeypatch):
    """It waits, takes what is there, and leaves the rest as the first did: all ranks run alike."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    second, store, inside = machine.tuner(tmp_path), Measurements(HOPPER, tmp_path), Event()

    def first_measures():
        with locks.lock_file(store.path, 10.0):
            inside.set()
            time.sleep(1.3)
            store.add(keyed(ONE, figures({"x": 1.0})))

    first = Thread(target=first_measures)
    first.start()
    inside.wait()
    assert second.measure([ONE, OTHER])
    first.join()
    assert not machine.said
    assert second.left == {key_of(OTHER)}
    assert second.store.find(ONE) is not None
    monkeypatch.delenv("WORLD_SIZE")  # who is no rank measures what is left
    assert machine.tuner(tmp_path).measure([OTHER])
    assert machine.measured == [key_of(OTHER)]


def test_one_that_waits_too_long_measures_nothing(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(tuner, "_SLACK", 0.1)
    mine = machine.tuner(tmp_path, seconds=0.1)
    with locks.lock_file(mine.store.path, 1.0):
        assert not mine.measure([ONE])
    assert not machine.said
    assert mine.left == {key_of(ONE)}


@pytest.mark.parametrize("name", ["_compile_failures", "from_row", "torch.cuda.mem_get_info"])
def test_nothing_is_raised(name, machine, tmp_path, monkeypatch):
    """What cannot be written is known in this process."""

    def fails(*_, **__):
        raise RuntimeError("CUDA driver is lost")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coda_inductor.select.measurements.write", full)
    mine = machine.tuner(tmp_path)
    assert mine.measure([THIRD])
    assert set(mine.store.user_rows()) == {key_of(THIRD)}
    monkeypatch.setattr(f"{tuner.__name__}.{name}", fails)
    assert not mine.measure([ONE, OTHER])
    assert mine.left == {key_of(ONE), key_of(OTHER)}
    mine.close()


def test_processes_are_few_and_end(machine, tmp_path):
    mine = machine.tuner(tmp_path)
    mine.measure(SITES)
    mine.measure([site(m=512), site(m=1024), site(m=2048)])
    assert 1 <= machine.most <= 2
    assert machine.busy
    mine.close()
    assert machine.busy == 0
    mine.close()
    assert len(machine.ended) == len(set(machine.ended))
