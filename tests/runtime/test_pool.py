# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation: what is compiled, how failure is told, how many processes there are,
and that nothing hangs or outlives its parent."""

import dataclasses
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("quack")

import quack.cache
from processes import alive, children, python, quick_worker, until
from programs import kinds

from coda_inductor.mainloop import mod  # noqa: F401 (sets the folder on import)
from coda_inductor.refusal import refuse
from coda_inductor.runtime import pool
from coda_inductor.select.config import Config

LATE = "compiling its kernel took too long"
FOR_EVER = "import time; time.sleep(1e6)"
COMPILER = "import subprocess; p = subprocess.Popen(['sleep', '1000000']); p.wait()"
GOOD = pool.KernelRequest(kinds()["scale"].to_json(), str(Config(128, 128, 2, 1, True)))
BAD = dataclasses.replace(GOOD, config="100x100:2x1:pp")


@pytest.fixture(autouse=True)
def own_pool(tmp_path, monkeypatch):
    """Kernels of a test go to its own folder, and its workers end with it."""
    monkeypatch.setattr(quack.cache, "CACHE_DIR", str(tmp_path))
    yield
    pool.shutdown()


def test_compiles_once_and_reports_what_cannot(tmp_path):
    pool.submit([GOOD, BAD, GOOD])
    outcome = pool.wait([GOOD, BAD], timeout=120)
    assert outcome[GOOD] is None
    assert "has no kernel: 100 rows" in outcome[BAD]
    assert pool.is_ready(GOOD)
    assert not pool.is_ready(BAD)
    assert len(list(tmp_path.rglob("*.o"))) == 1
    pool.submit([GOOD])
    assert not pool._futures
    assert not pool.is_ready(dataclasses.replace(GOOD, b_major="n"))


def test_why_nothing_is_compiled(monkeypatch):
    """The architecture is known without QuACK."""
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_Worker", Mock(side_effect=OSError("no processes")))
        patch.setenv("QUACK_ARCH", "sm_100a")
        pool.warm_up()
        assert pool.wait([GOOD]) == {GOOD: "no compile worker: no processes"}
        assert str(pool._Worker.call_args[0][0]) == "100"
    why = refuse("no-kernel-stack", "quack-kernels is not installed")
    monkeypatch.setattr(pool, "library_stack", lambda: why)
    pool.submit([GOOD])
    assert not pool._futures
    assert pool.wait([GOOD]) == {GOOD: "quack-kernels is not installed"}


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """A pool whose workers compile nothing, and whose kernels are never there; the next workers run
    these statements when they start."""

    def serve(text: str = "") -> None:
        monkeypatch.setattr(pool, "_MODULE", quick_worker(tmp_path, monkeypatch, text))

    serve()
    monkeypatch.setattr(pool, "is_ready", lambda request: False)
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "3")
    return serve


served = pytest.mark.usefixtures("serve")


def ask(program: str, number: int = 0) -> pool.KernelRequest:
    return pool.KernelRequest(program, str(number))


PASS = ask("pass")


def running() -> list[int]:
    """The workers, of which there is one at least."""
    return until(lambda: [worker.pid for worker in pool._workers])


@served
def test_workers_do_not_outlive_whoever_asked_for_them():
    """Nor do programs that they have started."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            pool.submit([ask(COMPILER)])
            (worker,) = running()
            (compiler,) = until(lambda: children(worker))
            os.write(write, f"{worker} {compiler}".encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    left = [int(pid) for pid in os.read(read, 100).split()]
    os.close(read)
    os.waitpid(parent, 0)
    assert len(left) == 2
    until(lambda: not any(map(alive, left)))


@served
def test_what_hangs_does_not_keep_a_program_from_ending(tmp_path):
    """Whose end takes the workers along."""
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from processes import until\n"
        "from coda_inductor.runtime import pool\n"
        "pool._MODULE, pool.is_ready = 'quick_worker', lambda request: False\n"
        "asked = [pool.KernelRequest('time.sleep(1e6)', str(i)) for i in range(3)]\n"
        "pool.wait(asked, 0.5)\n"
        "pool.submit(asked)\n"
        "print(*(worker.pid for worker in until(lambda: pool._workers)))"
    )
    assert not any(map(alive, map(int, python("-c", program).stdout.split())))


@served
def test_a_fork_leaves_the_workers_to_its_parent_and_one_that_dies_is_replaced():
    assert pool.wait([PASS]) == {PASS: None}
    (worker,) = running()
    child = os.fork()
    if child == 0:
        os._exit(0 if not pool._workers and pool.wait([PASS]) == {PASS: None} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert alive(worker)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not alive(worker))
    assert pool.wait([PASS]) == {PASS: None}
    (other,) = running()
    assert other != worker


@served
def test_workers_without_work_end_and_others_come(monkeypatch):
    """None is left as a zombie, which would be in the table of processes."""
    monkeypatch.setattr(pool, "_IDLE", 0.5)
    for _ in range(2):
        assert pool.wait([PASS]) == {PASS: None}
        (worker,) = running()
        until(lambda worker=worker: not Path(f"/proc/{worker}").exists())
        until(lambda: not pool._threads)


@served
def test_what_is_submitted_while_the_last_worker_ends_is_compiled(monkeypatch):
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "1")
    monkeypatch.setattr(pool, "_IDLE", 0.1)
    end, other = pool._end, ask("pass", 1)

    def late(worker):
        monkeypatch.setattr(pool, "_end", end)
        pool.submit([other])
        end(worker)

    monkeypatch.setattr(pool, "_end", late)
    assert pool.wait([PASS]) == {PASS: None}
    until(lambda: pool._end is end)
    assert pool.wait([other], timeout=30) == {other: None}


@served
def test_a_batch_has_a_deadline_and_what_hangs_is_killed(monkeypatch, tmp_path):
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "1")
    monkeypatch.setattr(pool, "_LIMIT", 2.0)
    stuck, late = ask(FOR_EVER), ask(f"open({str(tmp_path / 'late')!r}, 'w')")
    pool.submit([stuck])
    workers = running()
    assert pool.wait([stuck, late], timeout=0.5) == dict.fromkeys([stuck, late], LATE)
    until(lambda: not any(map(alive, workers)))
    assert pool.wait([PASS], timeout=30) == {PASS: None}
    assert not (tmp_path / "late").exists()
    pool.drop([stuck])
    assert not pool._futures


@served
def test_what_is_dropped_is_not_begun_and_may_be_asked_again(monkeypatch):
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "1")
    slow, dropped = ask("time.sleep(0.5)"), ask("os._exit(3)")
    pool.submit([slow, dropped])
    pool.drop([dropped, GOOD])
    assert pool.wait([slow]) == {slow: None}
    assert not pool._futures
    assert pool.wait([dropped]) == {dropped: "a compile worker died: status 3"}


@served
def test_a_worker_that_dies_is_tried_again_and_harms_no_other_kernel(tmp_path):
    once = f"os.path.exists(p := {str(tmp_path / 'tried')!r}) or (open(p, 'w'), os._exit(3))"
    requests = [ask("os.kill(os.getpid(), 9)"), ask("time.sleep(0.5)"), ask(once)]
    died = "a compile worker died: status -9"
    assert [*pool.wait(requests).values()] == [died, None, None]


def test_what_keeps_workers_from_compiling_is_a_reason(serve):
    serve("def broken(): raise ImportError('no libfoo')\ncompiler.prepare = broken")
    requests = [PASS, ask("pass", 1)]
    why = "a compile worker died: ImportError: no libfoo"
    assert pool.wait(requests) == dict.fromkeys(requests, why)


def test_the_number_of_workers_can_be_set(monkeypatch, caplog):
    """None leaves compiling to the first launch. By default ranks of a host share one worker a core
    that they may use."""
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "0")
    pool.warm_up()
    pool.submit([GOOD])
    assert pool.wait([GOOD]) == {GOOD: None}
    assert not pool._workers
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "40")
    assert pool.workers() == 40
    for cores, ranks, want in ((12, "2", 6), (16, "64", 1), (128, "1", 16), (4, "x", 4)):
        monkeypatch.delenv("CODA_COMPILE_WORKERS", raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert pool.workers() == want
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "many")
    assert pool.workers() >= 1
    assert "CODA_COMPILE_WORKERS='many'" in caplog.text
