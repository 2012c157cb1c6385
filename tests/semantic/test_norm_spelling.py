# SPDX-License-Identifier: Apache-2.0
"""Norms in other people's spellings: roots as powers and as quotients, means as sums, weights
before the root, casts; and the functions that look like these."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, raised, randn, reasons, side_by_side
from passes import codes

from coda_inductor.semantic import rms_norm

D, EPS = 16, 1e-2  # large beside mean(x^2), so that an eps in the wrong place shows


def mean_square(x):
    return x.pow(2).mean(-1, keepdim=True) + EPS


def rstd(x):
    return torch.rsqrt(mean_square(x))


def llama(x, w):
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    return w * (h * rstd(h)).to(x.dtype)


def gemma(x, w):
    h = x.float() if x.dtype == torch.bfloat16 else x
    return (h * rstd(h) * (1.0 + w.to(h.dtype))).type_as(x)


#: Of x (..., D) and w (D,).
RMS_NORMS = {
    "pow": lambda x, w: x * torch.pow(mean_square(x), -0.5) * w,
    "reciprocal": lambda x, w: x * torch.reciprocal(mean_square(x).sqrt()) * w,
    "one over": lambda x, w: x * (1.0 / torch.sqrt(mean_square(x))) * w,
    "to the minus one": lambda x, w: x * mean_square(x).sqrt() ** -1 * w,
    "root and weight": lambda x, w: x * (rstd(x) * w),
    "over the root": lambda x, w: w * x / mean_square(x).sqrt(),
    "casts": llama,
    "1 + w": gemma,
    "functional": lambda x, w: F.rms_norm(x, (D,), w, EPS),
    "not weighted": lambda x, w: x * rstd(x),
    "functional, not weighted": lambda x, w: F.rms_norm(x, (D,), eps=EPS),
}
CASTS = ("casts", "1 + w", "functional", "not weighted")


def norms_of(table, dtype, x, *vectors):
    """The ops that ``table``'s functions become, each with tensors of its own, in one graph;
    in float64 with gradients."""
    function, tensors = side_by_side(table.values(), x, *vectors)
    run = check_gradients if dtype == torch.float64 else check
    tensors = [2 + t if t.dim() > 1 else t for t in tensors]  # a mean in the wrong place shows
    harness = run(function, *(t.to(dtype).requires_grad_() for t in tensors))
    left = [str(n.target) for n in harness.raised.nodes if n.op.startswith("call")]
    assert not [op for op in left if any(root in op for root in ("rsqrt", "sqrt", "pow"))]
    return [n for n in harness.raised.nodes if n.target is rms_norm]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rms_norm(dtype):
    names = RMS_NORMS if dtype == torch.float64 else CASTS
    norms = norms_of({name: RMS_NORMS[name] for name in names}, dtype, (4, 6, D), (D,))
    for name, norm in zip(names, norms, strict=True):
        assert norm.target is rms_norm, name
        assert (norm.args[1] is None) == ("not weighted" in name), name


def test_weights_with_leading_dimensions_of_one():
    """Megatron's and lucidrains' shapes; the gradient has the weight's own."""
    ways = (lambda x, w: x * rstd(x) * w, lambda x, w: x * rstd(x) * (1 + w))
    function, tensors = side_by_side(ways, (4, 6, D), (1, 1, D))
    harness = check_gradients(function, *(t.requires_grad_() for t in tensors))
    norms = [n for n in harness.raised.nodes if n.target is rms_norm]
    assert len(norms) == 2
    assert all(n.args[1].meta["example_value"].shape == (D,) for n in norms)


def test_weights_that_vary_by_row_are_none():
    shapes = (4, 1, D), (1, 6, D), (1, 6, 1), (1, 1), (1,)
    given = [randn(4, 6, D).requires_grad_() for _ in shapes], [randn(*shape) for shape in shapes]
    harness = check_gradients(
        lambda xs, ws: [x * rstd(x) * w for x, w in zip(xs, ws, strict=True)], *given
    )
    norms = [n for n in harness.raised.nodes if n.target is rms_norm]
    assert [n.args[1] for n in norms] == [None] * len(shapes)
    assert reasons(harness).count("the weight is not one value per column") == len(shapes)


def test_an_eps_that_is_a_tensor_is_not_read():
    """It may hold another value when the graph runs."""
    harness = check_gradients(
        lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps),
        randn(4, 6, D).requires_grad_(), torch.full((1,), EPS, dtype=torch.float64),
    )  # fmt: skip
    assert raised(harness, rms_norm) == 0
    assert codes(harness) == {"not-constant"}


N = 6


def over(dim, keepdim=True):
    return lambda x, w: x * torch.rsqrt(x.pow(2).mean(dim, keepdim=keepdim) + EPS) * w


def scaled_by(root):
    return lambda x, w: x * root(x) * w


def variance(x, **how):
    return x.var(-1, keepdim=True, **how)


def by_root(statistic):
    return scaled_by(lambda x: torch.rsqrt(statistic(x) + EPS))


#: Of x (N, N, N) and w (N,).
OTHERS = {
    "read elsewhere": lambda x, w: (w * (x * (root := rstd(x))), root),
    "two dims": over((1, 2)),
    "no keepdim": over(-1, keepdim=False),
    "not centered": scaled_by(lambda x: variance(x, unbiased=True) ** -0.5),
    "floor": scaled_by(
        lambda x: torch.div(1, mean_square(x).sqrt(), rounding_mode="floor").clamp(0.1)
    ),
    "a sum": by_root(lambda x: x.square().sum(-1, True) / N),
    "scaled eps": scaled_by(
        lambda x: torch.rsqrt(torch.add(x.pow(2).mean(-1, True), EPS, alpha=3))
    ),
    "sum of columns": by_root(lambda x: x.square().sum(-2, True) / N),
    "of the weighted": lambda x, w: by_root(lambda y: y.sin().square().mean(-1, True))(x * w, 1.0),
    "two dims normalized": lambda x, w: F.rms_norm(x, (N, N), None, EPS),
    "unbiased": lambda x, w: (x - x.mean(-1, True)) * torch.rsqrt(variance(x) + EPS),
}


def test_what_only_looks_like_a_norm_stays():
    function, tensors = side_by_side(OTHERS.values(), (N, N, N), (N,))
    harness = check_gradients(function, *(t.requires_grad_() for t in tensors))
    assert raised(harness, rms_norm) == 0
    assert "its intermediate" in reasons(harness)  # of what is read elsewhere
