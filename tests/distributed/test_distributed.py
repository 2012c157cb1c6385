# SPDX-License-Identifier: Apache-2.0
"""Several ranks over gloo: steps of training equal eager's on one rank, what fuses, a clean end.

The checks are in the modules ``checks_...``; processes of one group run all of a module's. Graphs
run op by op behind our passes but in ``checks_inductor``.
"""

from __future__ import annotations

import time

import checks_ddp
import checks_four
import checks_fsdp
import checks_inductor
import checks_tensor
import pytest
import ranks

#: Module, processes, seconds: several times what a machine that has nothing else to do takes.
GROUPS = (
    (checks_ddp, 2, 150),
    (checks_fsdp, 2, 150),
    (checks_tensor, 2, 150),
    (checks_four, 4, 150),
    (checks_inductor, 2, 240),
)
CHECKS = [
    pytest.param(module.__name__, world, seconds, check, id=f"{module.__name__[7:]}-{check[6:]}")
    for module, world, seconds in GROUPS
    for check in ranks.checks(module)
]
pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(("module", "world", "seconds", "check"), CHECKS)
def test_ranks(module, world, seconds, check):
    if errors := ranks.group(module, world, seconds).errors(check):
        pytest.fail(errors, pytrace=False)


def test_a_hang_is_a_failure_in_time():
    begun = time.monotonic()
    hung = ranks.Group("hanging", 1, 10)
    assert time.monotonic() - begun < 60
    assert hung.codes != [0]
    assert hung.errors("check_that_hangs").startswith(ranks.NOT_ENDED)
    assert hung.errors("check_behind_it") == ranks.NOT_RUN


@pytest.mark.parametrize(
    ("module", "world", "seconds"), [(m.__name__, *how) for m, *how in GROUPS], ids=str
)
def test_every_rank_ends_by_itself(module, world, seconds):
    done = ranks.group(module, world, seconds)
    assert done.codes == [0] * world, done.said[-4000:]
