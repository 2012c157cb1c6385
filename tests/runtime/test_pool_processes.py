# SPDX-License-Identifier: Apache-2.0
"""The processes of the compile pool: how many, and that nothing hangs or outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("quack")

from processes import alive, children, quick_server, until

from coda_inductor.runtime import client, pool

ROOT = Path(__file__).parents[2]
FOR_EVER = "import time; time.sleep(1000)"
COMPILER = "import subprocess; p = subprocess.Popen(['sleep', '1000']); p.wait()"


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """The next server runs these statements when it starts."""
    return lambda text: quick_server(tmp_path, monkeypatch, text)


@pytest.fixture(autouse=True)
def quick_pool(tmp_path, monkeypatch):
    """A pool whose server compiles nothing, and whose kernels are never there."""
    monkeypatch.setattr(client, "_MODULE", quick_server(tmp_path, monkeypatch))
    monkeypatch.setattr(pool, "_file", lambda request: tmp_path / "none")
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "3")
    yield
    pool.shutdown()


def ask(program: str, number: int = 0) -> pool.KernelRequest:
    """A request whose worker runs ``program``."""
    return pool.KernelRequest(program, str(number), arch="90")


def running() -> tuple[int, list[int]]:
    """The server and its workers, of which there is one at least."""
    (server,) = pool._servers.values()
    return server.child.pid, until(lambda: children(server.child.pid))


def test_workers_do_not_outlive_whoever_asked_for_them():
    """Nor do the compilers that they have started."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            pool.submit([ask(COMPILER)])
            server, workers = running()
            (compiler,) = until(lambda: children(workers[0]))
            os.write(write, f"{server} {workers[0]} {compiler}".encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    left = [int(pid) for pid in os.read(read, 100).split()]
    os.close(read)
    os.waitpid(parent, 0)
    assert len(left) == 3
    until(lambda: not any(map(alive, left)))


def test_workers_do_not_outlive_the_server():
    pool.submit([ask(FOR_EVER)])
    server, workers = running()
    os.kill(server, signal.SIGKILL)
    until(lambda: not any(map(alive, workers)))


def test_a_fork_leaves_the_server_to_its_parent():
    pool.submit([ask(FOR_EVER)])
    server, workers = running()
    connection = pool._servers["90"].child.connection
    child = os.fork()
    if child == 0:
        os._exit(0 if connection.closed and not pool._servers and not pool._jobs else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert alive(server)
    assert alive(workers[0])


def test_a_compiler_that_never_returns_is_killed():
    """With what it has started."""
    stuck = ask(COMPILER)
    pool.submit([stuck])
    _, workers = running()
    (compiler,) = until(lambda: children(workers[0]))
    start = time.monotonic()
    assert pool.wait([stuck], timeout=0.5) == {stuck: "compiling its kernel took too long"}
    assert time.monotonic() - start < 30
    until(lambda: not any(map(alive, [*workers, compiler])))
    assert not pool._jobs
    assert pool.wait([ask("pass")], timeout=30) == {ask("pass"): None}


def test_work_that_was_not_begun_is_dropped_too(monkeypatch, tmp_path):
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "1")
    late = ask(f"open({str(tmp_path / 'late')!r}, 'w')")
    pool.wait([ask(FOR_EVER), late], timeout=0.5)
    assert pool.wait([ask("pass")], timeout=30) == {ask("pass"): None}
    assert not (tmp_path / "late").exists()


SCRIPT = """
import sys, time
from pathlib import Path
from coda_inductor.runtime import client, pool
sys.path.insert(0, sys.argv[1])
client._MODULE = "quick_server"
pool._file = lambda request: Path("none")
stuck = [pool.KernelRequest("time.sleep(1000)", str(i), arch="90") for i in range(2)]
print(list(pool.wait(stuck[:1], timeout=2).values()))
pool.submit(stuck[1:])
time.sleep(0.5)
print(time.time(), flush=True)
"""


def test_exit_takes_a_second(tmp_path):
    """A job that was given up, and one that still runs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT,
        check=False,
    )  # fmt: skip
    end = time.time()
    assert done.returncode == 0, done.stderr
    said, at = done.stdout.splitlines()
    assert said == "['compiling its kernel took too long']"
    assert end - float(at) < 10  # one, and what a busy machine takes for torch's own end


def test_a_server_that_was_stopped_holds_nobody_up():
    pool.submit([ask(FOR_EVER)])
    server, workers = running()
    os.kill(server, signal.SIGSTOP)
    start = time.monotonic()
    pool.wait([ask("pass")], timeout=0.2)
    pool.submit([ask("#" * 100_000, i) for i in range(20)])  # more than a pipe holds
    pool.shutdown()
    assert time.monotonic() - start < 30
    until(lambda: not any(map(alive, [server, *workers])))


def test_workers_start_as_they_are_needed():
    assert pool.wait([ask("pass")]) == {ask("pass"): None}
    server, workers = running()
    assert pool.wait([ask("pass", 1)]) == {ask("pass", 1): None}
    assert running() == (server, workers)
    requests = [ask("time.sleep(0.5)", i) for i in range(6)]
    pool.submit(requests)
    assert len(until(lambda: len(children(server)) > 1 and children(server))) <= 3
    assert pool.wait(requests, timeout=60) == dict.fromkeys(requests)
    assert len(children(server)) == 3


def test_a_worker_that_dies_is_tried_again_and_dying_twice_is_a_reason(tmp_path):
    once = f"os.path.exists(p := {str(tmp_path / 'tried')!r}) or (open(p, 'w'), os._exit(3))"
    requests = [ask("os._exit(3)"), ask("os.kill(os.getpid(), 9)"), ask(once)]
    first, second, third = pool.wait(requests).values()
    assert first == "a compile worker died: exit status 3"
    assert second == "a compile worker died: signal 9"
    assert third is None


def test_a_server_that_died_is_replaced():
    pool.wait([ask("pass")])
    server, _ = running()
    os.kill(server, signal.SIGKILL)
    assert pool.wait([ask("pass", 1)]) == {ask("pass", 1): None}
    assert running()[0] != server


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def broken(*_): raise ImportError('no libfoo')\nserver.prepare = broken",
         "no compile server: ImportError: no libfoo"),
        ("def fork(): raise OSError('too many')\nos.fork = fork",
         "no compile worker could be started: too many"),
    ],
)  # fmt: skip
def test_what_keeps_a_server_from_compiling_is_a_reason(text, why, serve):
    serve(text)
    requests = [ask("pass"), ask("pass", 1)]
    assert pool.wait(requests) == dict.fromkeys(requests, why)


def test_an_idle_server_ends_and_another_is_started(serve):
    serve("server.IDLE = 0.5")
    assert pool.wait([ask("time.sleep(1)")]) == {ask("time.sleep(1)"): None}
    (server,) = pool._servers.values()
    until(lambda: server.ended, 30)
    until(lambda: not alive(server.child.pid), 5)  # it closes its files before it is gone
    assert pool.wait([ask("pass")]) == {ask("pass"): None}


@pytest.mark.parametrize(
    ("cores", "ranks", "want"),
    [(128, "8", 2), (128, "2", 8), (12, "2", 6), (16, "64", 1), (4, "8", 1), (128, "1", 16),
     (4, "", 4), (4, "x", 4), (12, None, 12)],
)  # fmt: skip
def test_ranks_of_a_host_share_one_worker_a_core_that_they_may_use(cores, ranks, want, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.delenv("CODA_COMPILE_WORKERS")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    client._workers.cache_clear()
    assert client.workers() == want


@pytest.mark.parametrize(("rank", "want"), [("0", "0123456"), ("1", "3456012"), ("", "0123456")])
def test_each_rank_begins_with_other_kernels(rank, want, tmp_path, monkeypatch):
    """All ask for the same ones: what the others have compiled meanwhile is there."""
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", rank)
    wanted = [ask(f"open({str(tmp_path / 'order')!r}, 'a').write('{i}')") for i in range(7)]
    assert pool.wait(wanted) == dict.fromkeys(wanted)
    assert (tmp_path / "order").read_text() == want


def test_no_workers_leave_compiling_to_the_first_launch(monkeypatch):
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "0")
    pool.warm_up()
    assert pool.submit([ask("pass")]) == 0
    assert pool.wait([ask("pass")]) == {ask("pass"): None}
    assert not pool._servers


def test_the_number_of_workers_can_be_set(monkeypatch, caplog):
    monkeypatch.setenv("CODA_COMPILE_WORKERS", "40")
    assert client.workers() == 40
    for text in ("many", "-1", "1.5"):
        monkeypatch.setenv("CODA_COMPILE_WORKERS", text)
        client._workers.cache_clear()
        assert client.workers() == client.workers() >= 1
        (message,) = caplog.messages
        assert f"CODA_COMPILE_WORKERS='{text}'" in message
        caplog.clear()
