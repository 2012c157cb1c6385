# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of fusing."""

import pytest
from planning import planner


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """As ``planner`` says."""
    return planner(monkeypatch, tmp_path)
