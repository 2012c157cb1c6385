# SPDX-License-Identifier: Apache-2.0
"""Several ranks over gloo: steps of training equal eager's on one rank, what fuses, a clean end.

The checks are in the modules ``checks_...``. Graphs run op by op behind our passes but in
``checks_inductor``.
"""

from __future__ import annotations

import importlib.util

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
