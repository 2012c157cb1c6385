# SPDX-License-Identifier: Apache-2.0
"""Results for fake tensors that are computed once, and those that have to be computed again."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from coda_inductor.compat import storage
from coda_inductor.semantic import fakes


class Counted:
    def __init__(self, result):
        self.result, self.calls = result, 0

    def __call__(self, *args):
        self.calls += 1
        return self.result(*args)


def test_layers_that_repeat_compute_once():
    """The results are alike, and each has memory of its own."""
    function = Counted(lambda x, dims: (x.transpose(*dims).contiguous(), [x.sum(-1)]))
    with FakeTensorMode():
        one, two = (fakes.once(function, torch.empty(3, 4), [0, 1]) for _ in range(2))
        other = fakes.once(function, torch.empty(3, 4).T, [0, 1])
    assert function.calls == 2
    assert one[0].shape == two[0].shape == (4, 3)
    assert one[0].stride() == two[0].stride()
    assert one[1][0].shape == two[1][0].shape
    assert storage(one[0]) != storage(two[0])
    assert other[0].shape == (3, 4)


@pytest.mark.parametrize("result", [lambda x: x[1:], lambda x: x.shape, lambda x: None])
def test_what_is_no_new_tensor_is_computed_again(result):
    function = Counted(result)
    with FakeTensorMode():
        x = torch.empty(4)
        assert [str(fakes.once(function, x)) for _ in range(2)] == [str(result(x))] * 2
    assert function.calls == 2


def test_symbolic_sizes_are_computed_again():
    function, env = Counted(torch.clone), ShapeEnv()
    real = torch.empty(5, 7)
    with FakeTensorMode(shape_env=env) as mode:
        x = mode.from_tensor(real, static_shapes=False)
        for _ in range(2):
            assert fakes.once(function, x).shape == x.shape
    assert function.calls == 2


def test_results_are_dropped_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(fakes, "_MOST", 4)
    monkeypatch.setattr(fakes, "_RESULTS", {})
    with FakeTensorMode():
        for size in range(10):
            fakes.once(torch.clone, torch.empty(size))
    assert len(fakes._RESULTS) <= 4
