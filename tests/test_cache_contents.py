# SPDX-License-Identifier: Apache-2.0
"""What is in the cache, and what leaves it when it is too large."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from programs import kinds

from coda_inductor import OptionError, cache_contents, cache_dir
from coda_inductor.cache_contents import entries, limit, remove, tidy
from coda_inductor.locks import held
from coda_inductor.select.device import H100
from coda_inductor.select.store import Store

HOUR = 3600.0
NOW = time.time()
VERSION = "x86_64-quack0.6.5-cutlass4.8.1-cu12"


def put(path: Path, hours: float, size: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (NOW - hours * HOUR, NOW - hours * HOUR))
    return path


def kernel(base: Path, digit: str, hours: float, size: int = 1000, version: str = VERSION) -> Path:
    path = base / "kernels" / version / ("f" * 64) / f"{digit * 64}.o"
    put(path.with_suffix(".lock"), hours, 0)
    return put(path, hours, size)


@pytest.fixture
def base(tmp_path):
    """One file of each kind, two hours old, and files that are not ours."""
    base = tmp_path / "coda_inductor"
    one = kernel(base, "a", 2)
    kernel(base, "b", 2, version="")
    put(base / "epilogues" / "0123abcd_crossed_v7.py", 2)
    put(base / "proofs" / ("2" * 64), 2)
    put(one.with_suffix(".o.tmp.17"), 2)
    put(base / "proofs" / f".{'2' * 64}.{'3' * 16}.tmp", 2)
    put(one.parent / "tmpabcd_1x2.tmp", 2)
    for name in ("precious.txt", "kernels/notes.o", "epilogues/mine.py", "proofs/thesis", "a.tmp"):
        put(base / name, 2000)
    for store in (Store(H100, base / "measured"), Store(H100, base / "measured" / "mine")):
        with held(store.path, 1.0):  # measurements are small, and dear: they and their lock stay
            store.add({})
    (base / "epilogues" / "99_v7.py").symlink_to(base / "precious.txt")
    return base


def test_every_kind_is_recognised_and_nothing_else(base):
    found = entries(base)
    assert sorted((e.kind, len(e.files)) for e in found) == [
        ("kernel", 2),
        ("kernel", 2),
        ("proof", 1),
        ("source", 1),
        *[("temporary", 1)] * 3,
    ]
    assert {e.size for e in found if e.kind == "kernel"} == {1000}
    assert all(abs(e.used - (NOW - 2 * HOUR)) < 1 for e in found)


def test_the_real_files_are_recognised(tmp_path, monkeypatch):
    """Names as those who write them make them."""
    pytest.importorskip("quack")
    from coda_inductor.mainloop import mod
    from coda_inductor.patterns import verdict
    from coda_inductor.patterns.source import Source

    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path))
    for variant in ("", "swapped"):
        cache_dir.write(mod.source_path(kinds()["swiglu"], variant), "text")
    cache_dir.write(mod.source_path(kinds()["norm_bwd"], "straight"), "text")
    verdict.record(Source(Path("a.py"), "", "0" * 64))
    temporary = cache_dir.temporary(mod.source_path(kinds()["swiglu"]))
    temporary.touch()
    found = sorted(e.kind for e in entries(tmp_path))
    assert found == ["proof", "source", "source", "source", "temporary"]


def test_least_recently_used_goes_first(tmp_path):
    old, middle, new = (kernel(tmp_path, d, h) for d, h in (("a", 30), ("b", 20), ("c", 10)))
    cache_contents._shrink(tmp_path, 2500, NOW)
    assert [p.exists() for p in (old, middle, new)] == [False, True, True]
    assert not old.with_suffix(".lock").exists()
    cache_contents._shrink(tmp_path, None, NOW)
    assert middle.exists()
    used = kernel(tmp_path, "d", 0.5)  # in the last hour
    cache_contents._shrink(tmp_path, 1, NOW)
    assert [p.exists() for p in (middle, used)] == [False, True]


def test_a_kernel_that_is_being_loaded_stays(tmp_path):
    path = kernel(tmp_path, "a", 5)
    with path.with_suffix(".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        (entry,) = entries(tmp_path)
        assert not remove(entry)
        cache_contents._shrink(tmp_path, 1, NOW)
    assert path.exists()
    assert remove(entry)
    assert not path.exists()


def test_old_temporaries_are_swept(base):
    young = put(base / "kernels" / VERSION / ("f" * 64) / f"{'c' * 64}.o.tmp.18", 0.1)
    cache_contents._shrink(base, None, NOW)
    assert young.exists()
    assert [e.kind for e in entries(base) if e.kind == "temporary"] == ["temporary"]


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


def test_the_limit_is_in_gib(monkeypatch):
    monkeypatch.delenv("CODA_CACHE_SIZE", raising=False)
    assert limit() == 4 * 2**30
    monkeypatch.setenv("CODA_CACHE_SIZE", "0.5")
    assert limit() == 2**29
    monkeypatch.setenv("CODA_CACHE_SIZE", "0")
    assert limit() is None
    for wrong in ("4G", "-1", "nan", "inf"):
        monkeypatch.setenv("CODA_CACHE_SIZE", wrong)
        with pytest.raises(OptionError, match=r"CODA_CACHE_SIZE='.*' is no number of GiB"):
            limit()


def test_a_wrong_limit_stops_no_kernel(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CODA_CACHE_SIZE", "large")
    with caplog.at_level("WARNING", "coda_inductor"):
        tidy(tmp_path, now=NOW)
    assert "CODA_CACHE_SIZE='large'" in caplog.text
