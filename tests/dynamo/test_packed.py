# SPDX-License-Identifier: Apache-2.0
"""A packed gate and up projection: read as two products that meet in one tile, in whatever way the
halves are taken out of it, or left as it is."""

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, leave_custom_ops, randn, side_by_side
from harness import Harness
from torch import nn
from torch.utils.checkpoint import checkpoint

D, H = 16, 24


CUTS = {
    "chunk": lambda z: z.chunk(2, -1),
    "index": lambda z: ((both := z.unflatten(-1, (2, H)))[..., 0, :], both[..., 1, :]),
    "slices": lambda z: (z[..., :H], z[:, :, H:]),
}


def mlp(cut, gate=lambda g, u: F.silu(g) * u, bias=False):
    def function(x, w, gamma, gate_up, b, down):
        x = x + F.linear(x, w)
        z = F.linear(F.rms_norm(x, (D,), gamma, 1e-2), gate_up, b if bias else None)
        return x + F.linear(gate(*cut(z)), down)

    shapes = ((D, D), (D,), (2 * H, D), (2 * H,), (D, H))
    return Weights(function, *(randn(*shape) for shape in shapes))


def pairs(harness) -> int:
    return sum(site.program.paired for site in harness.fused)


def divided(harness) -> set[int]:
    """Of how many dimensions what ``chunk`` divides is: a weight has 2, the product 3."""
    chunks = [node.args[0] for node in harness.raised.nodes if node.target is torch.chunk]
    return {node.meta["example_value"].dim() for node in chunks}


@pytest.mark.parametrize(("cut", "bias"), [("slices", False), ("index", False), ("chunk", True)])
def test_gradients_are_eagers(cut, bias):
    """The gradient's parts are made in down's dgrad; nothing joins them."""
    harness = check_gradients(mlp(CUTS[cut], bias=bias), randn(2, 5, D).requires_grad_())
    for name in ("rms_norm", "swiglu"):
        assert harness.counts[name] == harness.counts[f"{name}_backward"] == 1
    assert pairs(harness) == 1
    joined = [n for n in harness.graph.nodes if n.target is torch.ops.aten.cat.default]
    weight, row = (2 * H, D), (2 * H,)
    assert {tuple(n.meta["val"].shape) for n in joined} == ({weight, row} if bias else {weight})


def test_no_tokens_of_a_symbolic_batch():
    """A view may have one -1, but not beside a 0."""
    compiled = torch.compile(mlp(CUTS["chunk"]), backend=Harness())
    x = randn(3, 0, D)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        assert compiled(x).shape == (3, 0, D)


def test_a_symbolic_batch_in_a_checkpoint():
    """Torch 2.11 computes no product of symbolic sizes without its Python dispatcher."""
    layer = mlp(CUTS["chunk"]).requires_grad_(False)
    check(lambda x: checkpoint(layer, x, use_reentrant=False), randn(2, 3, D), dynamic=True)


def test_frozen_weights_and_gated_linear_units_share_a_tile():
    model = mlp(lambda z: (z,), nn.GLU()).requires_grad_(False)
    assert pairs(check_gradients(model, randn(2, 5, D).requires_grad_())) == 1


def test_partials_of_pairs_with_rows(monkeypatch):
    """The op's own implementation reads a row vector of 2N: every value twice."""
    leave_custom_ops(monkeypatch, "64x32:1x1:co")
    harness = check(mlp(CUTS["chunk"], bias=True), randn(2, 5, D))
    (pair,) = [s.program for s in harness.fused if s.program.paired]
    assert [o.kind for o in pair.operands] == ["col", "row", "row"]


def test_halves_that_are_no_floats_are_no_failure():
    """Strict: what warns would raise."""
    x, w = torch.ones(5, D, dtype=torch.complex64), torch.ones(2 * H, D, dtype=torch.complex64)
    assert not check(lambda x, w: torch.mul(*F.linear(x, w).chunk(2, -1)), x, w).fused


def changed(z):
    low, high = z[..., :H], z[..., H:]
    low.mul_(2)
    return gated(low, high)


def changed_between(z):
    low = z[..., :H] * 3
    z[..., H:] += 1
    return low * z[..., H:]


def in_two_modes(z):
    low = z[..., :H]
    with torch.no_grad():
        high = z[..., H:]
    return gated(low, high)


def gated(low, high):
    return F.silu(low) * high


def slices(z):
    return gated(z[..., :H], z[..., H:])


#: Of a product (2, 6, 2 H).
OTHERS = {
    **{f.__name__: f for f in (changed, changed_between, in_two_modes)},
    "read elsewhere": lambda z: slices(z) + z.mean(),
    "halves of the sequence": lambda z: F.glu(z, dim=1),
    "as in gpt-oss": lambda z: gated(z[..., ::2], z[..., 1::2]),
    "returned": lambda z: (z[..., :H], z[..., H:].sin()),
    "rows of a view": lambda z: gated((y := z.view(-1, 2 * H))[:, :H], y[:, H:]),
    "rows beside halves": lambda z: gated(*z.unflatten(-1, (2, H)).unbind(1)[:2]),
}  # fmt: skip


def test_what_else_is_taken_stays():
    """Each of a product of its own, in one graph; one weight is not K-major."""
    each = [lambda x, w, f=f: f(F.linear(x, w)) for f in OTHERS.values()]
    each.append(lambda x, w: slices(F.linear(x, w.reshape(D, 2 * H).t())))
    function, tensors = side_by_side(each, (2, 6, D), (2 * H, D))
    harness = check_gradients(function, *(t.requires_grad_(t.dim() == 3) for t in tensors))
    assert not divided(harness)
    assert not any(site.program.paired for site in harness.fused)
