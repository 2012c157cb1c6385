# SPDX-License-Identifier: Apache-2.0
"""What tests of the backend and tests of single kernels start from."""

import pytest

from coda_inductor import report
from coda_inductor.log import forget_warnings


@pytest.fixture
def fresh():
    """No reports and no warnings of the test before."""
    forget_warnings()
    report.forget()


@pytest.fixture
def no_fallbacks(fresh, caplog):
    """What does not run would be torch's ops after a warning."""
    yield
    assert not [said for said in caplog.messages if "falls back" in said]
