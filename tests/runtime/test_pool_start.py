# SPDX-License-Identifier: Apache-2.0
"""What the compile pool does to the program that starts it: nothing that it would notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coda_inductor.runtime import pool

pytest.importorskip("quack")

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, multiprocessing, os, pickle, threading, time

class Mine:
    pass

def environment(connection):
    connection.send({k: os.environ.get(k) for k in ("CUDA_VISIBLE_DEVICES", "CUTE_DSL_ARCH")})

def pickle_until(done, failures):
    while not done.wait(0.01):
        try:
            pickle.dumps(Mine())
        except Exception as error:
            failures.append(str(error))

if __name__ == "__main__":
    from coda_inductor.runtime import pool
    from kinds import kinds

    done, failures = threading.Event(), []
    thread = threading.Thread(target=pickle_until, args=(done, failures))
    thread.start()
    start = time.monotonic()
    pool.warm_up()
    seconds = time.monotonic() - start
    request = pool.KernelRequest(kinds()["scale"].to_json(), "100x100:2x1:pp", arch="90")
    why = pool.wait([request], timeout=200)[request]
    done.set()
    thread.join()
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(False)
    child = context.Process(target=environment, args=(send,))
    child.start()
    assert receive.poll(60)
    answer = {"failures": failures[:1], "seconds": seconds, "why": why, "child": receive.recv()}
    child.join()
    print(json.dumps(answer))
"""


def test_a_program_does_not_notice(tmp_path):
    """Its ``__main__`` can be pickled meanwhile, ``warm_up`` does not wait for imports, and its own
    ``multiprocessing`` children have its environment."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "QUACK_ARCH": "90"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment.pop("CUTE_DSL_ARCH", None)
    done = subprocess.run(
        [sys.executable, str(file)],
        env=environment, capture_output=True, text=True, timeout=280, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert "has no kernel: 100 rows" in answer["why"]
    assert answer["failures"] == []
    assert answer["seconds"] < 1
    assert answer["child"] == {"CUDA_VISIBLE_DEVICES": None, "CUTE_DSL_ARCH": None}


@pytest.mark.parametrize("there", [False, True])
def test_the_server_starts_early_only_where_no_kernel_was_compiled_yet(
    monkeypatch, tmp_path, there
):
    """Whoever has kernels on disk mostly needs no others, and a server imports for seconds."""
    started = []
    monkeypatch.setattr(pool, "warm_up", lambda: started.append(True))
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path))
    if there:
        (tmp_path / "version" / "coda_0123456789abcdef").mkdir(parents=True)
    pool.warm_up_early()
    assert bool(started) is not there
