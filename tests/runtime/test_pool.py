# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation: what is compiled, what is skipped, how failure is told; and that the
program that compiles notices nothing of it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import subprocess
import sys

import pytest

from coda_inductor.runtime import pool

pytest.importorskip("quack")

from programs import kinds

from coda_inductor.cache_dir import write
from coda_inductor.mainloop.environment import label
from coda_inductor.refusal import refuse
from coda_inductor.runtime import worker
from coda_inductor.select.config import Config

CONFIG = Config(128, 128, 2, 1, True)
GOOD = pool.KernelRequest(kinds()["scale"].to_json(), str(CONFIG), arch="90")
BAD = dataclasses.replace(GOOD, config="100x100:2x1:pp")


@pytest.fixture(autouse=True)
def own_pool(tmp_path, monkeypatch):
    """Kernels of a test go to its own folder, and its workers end with it."""
    import quack.cache

    from coda_inductor.mainloop import mod  # noqa: F401  (sets the folder on import)

    monkeypatch.setattr(quack.cache, "CACHE_DIR", str(tmp_path))
    yield
    pool.shutdown()


def test_compiles_once_and_reports_what_cannot(tmp_path):
    good, bad = GOOD, BAD
    assert pool.submit([good, bad, good]) == 2
    outcome = pool.wait([good, bad], timeout=120)
    assert outcome[good] is None
    assert "has no kernel: 100 rows" in outcome[bad]
    assert pool.is_ready(good)
    assert not pool.is_ready(bad)
    assert len(list(tmp_path.rglob("*.o"))) == 1
    assert pool.submit([good]) == 0
    other_majors = dataclasses.replace(good, b_major="n")
    assert not pool.is_ready(other_majors)


@pytest.mark.gpu
def test_nobody_hears_of_forks():
    """Python 3.12 warns of them where the CUDA driver has started a thread of its own."""
    program = (
        "from coda_inductor.runtime import pool\n"
        f"asked = pool.KernelRequest({GOOD.program!r}, '100x100:2x1:pp', arch='90')\n"
        "print(pool.wait([asked], timeout=120))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "has no kernel" in done.stdout
    assert "fork" not in done.stderr


def test_what_another_rank_compiled_meanwhile_is_not_compiled_again(tmp_path, monkeypatch):
    from coda_inductor.mainloop import ahead

    kernel, compiled = tmp_path / "kernel.o", []
    monkeypatch.setattr(ahead, "kernel_file", lambda *_: kernel)
    monkeypatch.setattr(ahead, "build", lambda *_: compiled.append(kernel))
    assert "could not be saved" in worker.compile_kernel(GOOD, None)
    kernel.touch()
    assert worker.compile_kernel(GOOD, None) is None
    assert compiled == [kernel]


def test_without_the_libraries_it_says_why(monkeypatch):
    why = refuse("no-kernel-stack", "quack-kernels is not installed")
    monkeypatch.setattr(pool, "library_stack", lambda: why)
    assert pool.submit([GOOD]) == 0
    assert pool.wait([GOOD]) == {GOOD: "quack-kernels is not installed"}


def in_a_daemon(request, found):
    found.put((pool.submit([request]), list(pool.wait([request]).values())))


def test_a_daemonic_process_leaves_compiling_to_the_first_launch():
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    process = context.Process(target=in_a_daemon, args=(GOOD, found), daemon=True)
    process.start()
    assert found.get(timeout=60) == (0, [None])
    process.join()


def test_a_pool_that_cannot_start_is_a_reason(monkeypatch):
    def no_processes(arch):
        raise OSError(f"no processes for {arch}")

    monkeypatch.setattr(pool, "Server", no_processes)
    monkeypatch.setenv("QUACK_ARCH", "90")
    pool.warm_up()
    request = pool.KernelRequest(kinds()["scale"].to_json(), str(CONFIG))
    assert "no processes for 90" in pool.wait([request])[request]


def test_the_architecture_is_known_without_quack(monkeypatch):
    monkeypatch.setenv("QUACK_ARCH", "sm_100a")
    assert pool._machine_arch() == "100"


@pytest.mark.parametrize("there", [False, True])
def test_the_server_starts_early_only_where_no_kernel_was_compiled_yet(
    monkeypatch, tmp_path, there
):
    """Whoever has kernels on disk mostly needs no others, and a server imports for seconds."""
    started = []
    monkeypatch.setattr(pool, "warm_up", lambda: started.append(True))
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path))
    if there:
        write(tmp_path / "kernels" / label() / "version" / "kernel.o", "")
    pool.warm_up_early()
    assert bool(started) is not there
