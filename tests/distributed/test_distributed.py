# SPDX-License-Identifier: Apache-2.0
"""Several ranks over gloo: steps of training equal eager's on one rank, what fuses, a clean end.

``cases`` has the checks. All run in the same two processes; graphs run op by op behind our passes.
"""

import cases
import pytest
import ranks


def both() -> ranks.Group:
    return ranks.group("cases", 2)


@pytest.mark.parametrize("check", cases.CHECKS)
def test_ranks(check):
    if errors := both().errors(check):
        pytest.fail(errors, pytrace=False)


def test_every_rank_ends_by_itself():
    assert both().codes == [0, 0], both().said[-4000:]
