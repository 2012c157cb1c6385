# SPDX-License-Identifier: Apache-2.0
"""Exported programs call aten ops: what fires in them is what fires in the model they came from.
In-place ops on tensors that nothing else shares are read as plain ones; others stay in place."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, raised, randn, side_by_side, swiglu
from harness import Harness
from torch import nn
from zoo.layers import Gated

from coda_inductor.matching.guards import mutates
from coda_inductor.semantic import rms_norm

D, WIDE = 16, 24


def by_hand(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x):
        return by_hand(x, self.weight)


def layer():
    how = {"gate": lambda gate, up: gate * torch.sigmoid(gate) * up, "norm": lambda _: Norm()}
    return Gated(D, WIDE, front=True, **how)


@pytest.mark.parametrize(("dtype", "strict"), [(torch.float64, True), (torch.bfloat16, False)])
def test_norms_and_gates(dtype, strict):
    model, x = nn.Sequential(layer(), layer()).to(dtype), randn(2, 3, D, dtype=dtype)
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=strict).module()
    want, have = check(model, x, reference=True), check(program, x, reference=True)
    assert have.counts == want.counts
    assert {s.program.key for s in have.fused} == {s.program.key for s in want.fused}
    assert have.counts["rms_norm"] == 2


def test_training_of_an_exported_program_of_any_size():
    model, x = layer().double(), randn(5, 3, D).requires_grad_()
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
    have = check_gradients(program, x, dynamic=True)
    assert have.counts["rms_norm_backward"] == have.counts["swiglu_backward"] == 1


def asserted(inside):
    """A norm. The assertion reads a value inside of it, or its result."""

    def function(x, w, v, dtype=torch.float64):
        x = x @ w
        square = x.pow(2)
        y = x * (square.mean(-1, keepdim=True) + EPS).rsqrt() * v
        torch.ops.aten._assert_tensor_metadata.default(square if inside else y, dtype=dtype)
        return y @ w

    return function


@pytest.mark.parametrize("inside", [True, False])
def test_assertions_stay(inside):
    """One that reads a value inside of an idiom hides it."""
    harness = check_gradients(asserted(inside), *inputs())
    assert raised(harness, rms_norm) == (not inside)
    assert any("_assert_tensor_metadata" in str(n.target) for n in harness.graph.nodes)
    with pytest.raises(Exception, match="mismatch"):
        Harness().run(asserted(inside), *inputs(), torch.float16)


EPS = 1e-6


def changes(harness):
    return [n for n in harness.raised.nodes if mutates(n)]


def inputs():
    return tuple(randn(*shape).requires_grad_() for shape in ((4, D), (D, D), (D,)))


GATES = (
    lambda x, w: F.silu(x @ w).mul_(x @ w.t()),
    lambda x, w: F.silu(x @ w, inplace=True) * (x @ w.t()),
    lambda x, w: F.silu(x @ w, True) * (x @ w.t()),
)


def test_a_gate():
    function, tensors = side_by_side(GATES, (4, D), (D, D))
    harness = check_gradients(function, *(t.requires_grad_() for t in tensors))
    assert raised(harness, swiglu) == len(GATES)
    assert not changes(harness)


def behind_a_view(x, w, v):
    y = x @ w
    first = y[0]
    y.mul_(2)
    return y, first


def that_narrows(x, w, v):
    y = x.float()
    y.add_(x @ w)
    return y


def without_gradients(x, w, v):
    y = x @ w
    with torch.no_grad():
        y.mul_(2)
    return y * v


OTHERS = (behind_a_view, that_narrows, without_gradients)


def test_what_something_else_sees_stays():
    function, tensors = side_by_side(OTHERS, (4, D), (D, D), (D,))
    harness = check_gradients(function, *(t.requires_grad_() for t in tensors), tolerance=1e-6)
    assert len(changes(harness)) == len(OTHERS)


def test_the_result_of_a_librarys_op_is_its_own():
    """As of transformers' grouped products; not where a view of it is read as well."""

    def function(x, w):
        y, z = torch.ops.coda_tests.doubled(x), torch.ops.coda_tests.doubled(x)
        first = z[0]
        y.add_(1)
        z.add_(1)
        return y @ w, z @ w, first

    with torch.library._scoped_library("coda_tests", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
        assert len(changes(check(function, torch.randn(4, D), torch.randn(D, D)))) == 1


def test_a_change_of_an_input_stays():
    """The values of the arguments are eager's too."""
    assert changes(check(lambda x, w: x.add_(1) @ w, *(t.detach() for t in inputs()[:2])))
