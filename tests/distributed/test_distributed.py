# SPDX-License-Identifier: Apache-2.0
"""Several ranks over gloo: steps of training equal eager's on one rank, what fuses, a clean end.

The checks are in the modules ``checks_...``. Graphs run op by op behind our passes but in
``checks_inductor``.
"""

from __future__ import annotations

import importlib.util
import signal
import time

import checks_ddp
import checks_experts
import checks_fsdp
import checks_inductor
import checks_tensor
import pytest
import ranks

#: All run in the same two processes. Seconds: several times what a machine takes that has nothing
#: else to do.
MODULES = [checks_ddp, checks_experts, checks_fsdp, checks_tensor, checks_inductor]
if importlib.util.find_spec("torchao") is not None:
    import checks_float8

    MODULES.append(checks_float8)
SECONDS = 540
CHECKS = [check for module in MODULES for check in ranks.checks(module)]
pytestmark = pytest.mark.timeout(600)


def both() -> ranks.Group:
    return ranks.group(tuple(module.__name__ for module in MODULES), 2, SECONDS)


@pytest.mark.parametrize("check", CHECKS)
def test_ranks(check):
    if errors := both().errors(check):
        pytest.fail(errors, pytrace=False)


def test_every_rank_ends_by_itself():
    assert both().codes == [0, 0], both().said[-4000:]


def test_a_rank_that_is_killed_ends_the_others_with_torchs_error():
    """And nobody leaves processes behind: compile workers end with those who asked."""
    died = ranks.Group(("dying",), 2, 60, patience=True)
    assert died.codes == [1, -signal.SIGKILL]
    error = died.errors("dying.check_that_a_rank_dies")
    assert "RuntimeError" in error
    assert "peer" in error
    assert "cannot go on" not in error
    deadline = time.monotonic() + 10
    while (left := died.alive()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
