# SPDX-License-Identifier: Apache-2.0
"""Ranks with kernels: FSDP2, DDP, tensor and sequence parallelism, and the death of a rank. They
share a GPU where there are more ranks (``ranks.py``): as correct, and no measure of speed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import checks_cuda
import checks_float8_cuda
import checks_four_cuda
import ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]
SECONDS = 400


CHECKS = [
    (module.__name__, count, check)
    for module, count in ((checks_cuda, 2), (checks_float8_cuda, 2), (checks_four_cuda, 4))
    for check in ranks.checks(module)
]


@pytest.mark.parametrize(("module", "count", "check"), CHECKS)
def test_ranks(module, count, check):
    if "float8" in module:
        pytest.importorskip("torchao.float8")
    if errors := ranks.group((module,), count, SECONDS).errors(check):
        pytest.fail(errors, pytrace=False)


def test_every_rank_ends_by_itself():
    done = ranks.group(("checks_cuda",), 2, SECONDS)
    assert done.codes == [0, 0], done.said[-4000:]
    assert not done.alive()


def test_a_rank_that_is_killed_ends_the_others():
    """With an error of torch's, within NCCL's patience, and no compile worker is left behind."""
    died = ranks.Group(("dying_cuda",), 2, 120, patience=True)
    assert died.codes[1] == -9
    assert died.codes[0] not in (0, None)
    assert "cannot go on" not in died.errors("dying_cuda.check_that_a_rank_dies")
    deadline = time.monotonic() + 15
    while (left := died.alive()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
