# SPDX-License-Identifier: Apache-2.0
"""Ranks with kernels: FSDP2, DDP, tensor and sequence parallelism. They share a GPU where there are
more ranks (``ranks.py``): as correct, and no measure of speed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import cuda_cases
import ranks

pytestmark = pytest.mark.gpu


def group() -> ranks.Group:
    return ranks.group("cuda_cases", 2)


@pytest.mark.parametrize("check", cuda_cases.CHECKS)
def test_ranks(check):
    if errors := group().errors(check):
        pytest.fail(errors, pytrace=False)


def test_every_rank_ends_by_itself():
    assert group().codes == [0, 0], group().said[-4000:]
