# SPDX-License-Identifier: Apache-2.0
"""One process measures at a time; however it ends, the next one may."""

import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest

from coda_inductor import locks
from coda_inductor.locks import lock_file

HOLDER = """
import filelock, sys, time
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "measured" / "gpu.json"


@pytest.fixture
def holder(path):
    """Another process, which holds the lock."""
    place = next(locks._candidates(path))
    other = subprocess.Popen([sys.executable, "-c", HOLDER, place], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    yield other
    other.kill()
    other.wait()
    other.stdout.close()


def test_another_process_is_waited_for_so_long(path, holder):
    """One that is killed holds nothing."""
    start = time.monotonic()
    with lock_file(path, 0.3) as got:
        assert not got
    assert time.monotonic() - start >= 0.3
    threading.Timer(0.3, holder.kill).start()
    start = time.monotonic()
    with lock_file(path, 60.0) as got:
        assert got
    assert time.monotonic() - start > 0.2


def test_where_no_lock_can_lie_another_place_is_taken(path, tmp_path, monkeypatch):
    """Without any place nothing is held."""
    path.parent.write_text("no folder")
    monkeypatch.setattr(locks, "private_dir", lambda: tmp_path)
    with lock_file(path, 1.0) as got:
        assert got
        assert list((tmp_path / "locks").iterdir())

        def beside():
            with lock_file(path, 0.2) as other:
                seen.append(other)

        seen: list[bool] = []
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert seen == [False]

    monkeypatch.setattr(locks.filelock, "FileLock", Mock(side_effect=OSError("read-only")))
    with lock_file(path, 1.0) as got:
        assert not got
