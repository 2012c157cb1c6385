# SPDX-License-Identifier: Apache-2.0
"""What leaves the cache when it is too large."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from coda_inductor import OptionError, cache_contents, cache_dir
from coda_inductor.cache_contents import limit, tidy

HOUR = 3600.0
NOW = time.time()
VERSION = "x86_64-quack0.6.5-cutlass4.8.1-cu12"
HASH, NONE = "f" * 64, float("inf")


def put(path: Path, hours: float, size: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (NOW - hours * HOUR, NOW - hours * HOUR))
    return path


def kernel(base: Path, digit: str, hours: float, size: int = 1000, version: str = VERSION) -> Path:
    path = base / "kernels" / version / HASH / f"{digit * 64}.o"
    put(path.with_suffix(".lock"), hours, 0)
    return put(path, hours, size)


def test_kernels_and_temporary_files_go_and_nothing_else(tmp_path):
    one = kernel(tmp_path, "a", 2)
    ours = [one, kernel(tmp_path, "b", 2, version="")]
    left = (f"{one.name}.tmp.17", "tmpabcd_1x2.tmp", f".{one.name}.{'3' * 16}.tmp")
    ours += [put(one.parent / name, 2) for name in left]
    names = ("precious.txt", "kernels/notes.o", "epilogues/0123abcd_crossed_v7.py", "a.tmp",
             f"proofs/{HASH}", f"kernels/{HASH}/thesis.o", "measured/gpu.json")  # fmt: skip
    others = [put(tmp_path / name, 2000) for name in names]
    link = tmp_path / "kernels" / HASH / f"{'c' * 64}.o"
    link.symlink_to(tmp_path / "precious.txt")
    young = put(one.parent / f"{'c' * 64}.o.tmp.18", 0.1)
    cache_contents._shrink(tmp_path, NONE, NOW)
    assert [path.exists() for path in ours] == [True, True, False, False, False]
    cache_contents._shrink(tmp_path, 1, NOW)
    assert not any(path.exists() for path in ours)
    assert not one.with_suffix(".lock").exists()
    assert all(path.exists() for path in (*others, link, young))


def test_temporary_files_are_called_as_those_who_write_them_do(tmp_path):
    path = cache_dir.temporary(tmp_path / "kernels" / VERSION / HASH / f"{HASH}.o")
    put(path, 2)
    cache_contents._shrink(tmp_path, NONE, NOW)
    assert not path.exists()


def test_least_recently_used_goes_first(tmp_path):
    old, middle, new = (kernel(tmp_path, d, h) for d, h in (("a", 30), ("b", 20), ("c", 10)))
    cache_contents._shrink(tmp_path, 2500, NOW)
    assert [p.exists() for p in (old, middle, new)] == [False, True, True]
    used = kernel(tmp_path, "d", 0.5)  # in the last hour
    cache_contents._shrink(tmp_path, 1, NOW)
    assert [p.exists() for p in (middle, used)] == [False, True]


def test_a_kernel_that_is_being_loaded_stays(tmp_path):
    path = kernel(tmp_path, "a", 5)
    with path.with_suffix(".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        cache_contents._shrink(tmp_path, 1, NOW)
    assert path.exists()
    cache_contents._shrink(tmp_path, 1, NOW)
    assert not path.exists()


def test_tidying_happens_once_an_hour(tmp_path, monkeypatch):
    monkeypatch.setenv("CODA_CACHE_SIZE", "1e-7")
    first = kernel(tmp_path, "a", 50)
    tidy(tmp_path, now=NOW)
    assert not first.exists()
    second = kernel(tmp_path, "b", 50)
    tidy(tmp_path, now=NOW + 0.9 * HOUR)
    assert second.exists()
    tidy(tmp_path, now=NOW + 1.1 * HOUR)
    assert not second.exists()


def test_the_limit_is_in_gib(tmp_path, monkeypatch, caplog):
    """A wrong one stops no kernel."""
    monkeypatch.delenv("CODA_CACHE_SIZE", raising=False)
    assert limit() == 4 * 2**30
    for text, size in (("0.5", 2**29), ("0", NONE)):
        monkeypatch.setenv("CODA_CACHE_SIZE", text)
        assert limit() == size
    for wrong in ("4G", "-1", "nan", "inf"):
        monkeypatch.setenv("CODA_CACHE_SIZE", wrong)
        with pytest.raises(OptionError, match=r"CODA_CACHE_SIZE='.*' is no number of GiB"):
            limit()
    tidy(tmp_path, now=NOW)
    assert "CODA_CACHE_SIZE='inf'" in caplog.text
