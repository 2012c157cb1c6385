# SPDX-License-Identifier: Apache-2.0
"""What tests of the backend and tests of single kernels start from."""

from __future__ import annotations

import os

import pytest

from coda_inductor import report
from coda_inductor.log import forget_warnings

# What is fused must not depend on what this machine has measured. Tests of tuning set it.
os.environ.setdefault("CODA_TUNE", "never")


@pytest.fixture
def fresh():
    """No reports and no warnings of the test before."""
    forget_warnings()
    report.forget()
