# SPDX-License-Identifier: Apache-2.0
"""What tests of loading start from."""

from __future__ import annotations

import pytest

from coda_inductor.patterns import loading, verdict


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No files of other tests, and no verdicts."""
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "cache"))
    for module, name, value in (
        (loading, "_registered", {}), (verdict, "_proven", set()), (verdict, "_refused", {}),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    loading._load.cache_clear()
    loading._warn_once.cache_clear()
