# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation: what is compiled, what is skipped, how failure is told."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest

pytest.importorskip("quack")

from kinds import kinds
from processes import children, until

from coda_inductor.cache_dir import write
from coda_inductor.refusal import refuse
from coda_inductor.runtime import pool, worker
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
    pool._marker_folder.cache_clear()
    yield
    pool.shutdown()
    pool._marker_folder.cache_clear()


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


def test_files_of_equal_pids_do_not_meet(tmp_path, monkeypatch):
    """Two containers that share a folder: one writes while the other is about to replace."""
    replace, file = os.replace, tmp_path / "file"

    def late(*names):
        monkeypatch.setattr(os, "replace", replace)
        write(file, "theirs")
        replace(*names)

    monkeypatch.setattr(os, "replace", late)
    write(file, "ours")
    assert file.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [file]


def test_marker_that_cannot_be_written_fails_no_kernel(tmp_path, monkeypatch):
    kernel = tmp_path / "kernel.o"
    kernel.touch()
    monkeypatch.setattr(worker, "_compile", lambda *_: kernel)
    assert worker.compile_kernel(GOOD, kernel / "marker", None) is None
    assert worker.compile_kernel(GOOD, tmp_path / "marker", None) is None
    assert (tmp_path / "marker").read_text() == str(kernel)


def test_what_another_rank_compiled_meanwhile_is_not_compiled_again(tmp_path, monkeypatch):
    kernel, marker = tmp_path / "kernel.o", tmp_path / "marker"
    compiled = []
    monkeypatch.setattr(worker, "_compile", lambda *_: compiled.append(kernel) or kernel)
    write(marker, str(kernel))  # of a kernel that somebody has deleted
    assert worker.compile_kernel(GOOD, marker, None) is not None
    kernel.touch()
    assert worker.compile_kernel(GOOD, marker, None) is None
    assert compiled == [kernel]


def test_deadline_is_kept():
    request = pool.KernelRequest(kinds()["rms_partial"].to_json(), str(CONFIG), arch="90")
    assert pool.wait([request], timeout=0.0) == {request: "compiling its kernel took too long"}


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
    monkeypatch.setattr(pool, "_machine_arch", lambda: "90")
    pool.warm_up()
    request = pool.KernelRequest(kinds()["scale"].to_json(), str(CONFIG))
    assert "no processes for 90" in pool.wait([request])[request]


def test_a_killed_worker_is_tried_again_once():
    request = pool.KernelRequest(kinds()["dswiglu"].to_json(), str(CONFIG), b_major="n", arch="90")
    pool.submit([request])
    (server,) = pool._servers.values()

    def kill():
        os.kill(until(lambda: children(server.pid))[0], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    assert pool.wait([request], timeout=180) == {request: None}


def test_nothing_is_imported_from_the_current_folder(tmp_path, monkeypatch):
    """Which a program that is run as ``python -m`` or typed in has on its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    for name in ("json", "sympy", "cutlass", "coda_inductor"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "has no kernel: 100 rows" in pool.wait([BAD])[BAD]
    assert not (tmp_path / "ran").exists()


def test_the_architecture_is_known_without_quack(monkeypatch):
    pool._machine_arch.cache_clear()
    monkeypatch.setenv("QUACK_ARCH", "sm_100a")
    try:
        assert pool._machine_arch() == "100"
    finally:
        pool._machine_arch.cache_clear()
