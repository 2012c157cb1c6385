# SPDX-License-Identifier: Apache-2.0
"""What tests of the backend and tests of single kernels start from."""

from __future__ import annotations

import pytest

from coda_inductor import report
from coda_inductor.log import forget_warnings
from coda_inductor.runtime.op import set_strict


@pytest.fixture
def fresh():
    """No reports and no warnings of the test before."""
    forget_warnings()
    report.forget()


@pytest.fixture
def strict():
    """A kernel that does not run must fail the test, not fall back."""
    set_strict(True)
    yield
    set_strict(False)
