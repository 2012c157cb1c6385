# SPDX-License-Identifier: Apache-2.0
"""What tests of loading start from."""

from __future__ import annotations

import pytest

from coda_inductor.patterns import loading, verdict


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No files of other tests, and no verdicts."""
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "_registered", {})
    for cached in (loading._load, loading._warn_once, verdict.refusal):
        cached.cache_clear()
