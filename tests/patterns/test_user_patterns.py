# SPDX-License-Identifier: Apache-2.0
"""A user's pattern end to end: it fires, is the same function, trains, refuses, makes a kernel. A
norm of a user's waits like RMSNorm, which is defined alike, so that what stays is asked of that."""

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, check, check_gradients, leave_custom_ops, randn, reasons
from zoo.users import HIDDEN, MISH, SWISH, D, mish, mish_spelled_out, model, swish, write

from coda_inductor import Pattern, PatternError, patterns


def load(path: str):
    (pattern,) = patterns.load_file(path)
    return pattern


@pytest.mark.parametrize(("text", "gate", "dtype"), [
    (MISH, mish_spelled_out, torch.bfloat16), (SWISH, swish, torch.float64),
], ids=["mish", "swish"])  # fmt: skip
def test_gate_trains(text, gate, dtype, tmp_path):
    """Gradients equal eager's, and are made in the epilogue; only what the GEMMs made is kept."""
    layers, path = 2, write(tmp_path, text)
    given = model(gate, layers, dtype), randn(2, 3, D, dtype=dtype)
    harness = check_gradients(*given, patterns=[path])
    name = load(path).name
    assert harness.counts[name] == harness.counts[f"{name}_backward"] == layers
    assert harness.counts["rms_norm"] == layers - 1  # the first input is made by no GEMM
    assert sum(site.program.paired for site in harness.fused) == layers
    activations = [n for n in harness.saved if n.meta["val"].shape[-1] == HIDDEN and "mm" in n.name]
    assert len(activations) <= 2 * layers


def test_gradients_have_memory_of_their_own_or_are_empty(tmp_path):
    """Also one that is the incoming one; empty are those that are not needed."""
    text = MISH.replace("F.mish(gate) * up", "gate + up").replace(", spelled_out", ",")
    name = load(write(tmp_path, text)).op.__name__.split(".")[0]
    backward = getattr(torch.ops.coda_inductor, f"{name}_backward").default
    dy, gate, up = (randn(3, 4) for _ in range(3))
    found = backward(dy, gate, up, [True, True])
    assert_same(found, (dy, dy))
    assert len({t.data_ptr() for t in (dy, *found)}) == 3
    assert_same(backward(dy, gate, up, [False, True]), (gate.new_empty(0), dy))
    assert backward(dy, gate, up, [False, False])[0].numel() == 0


def test_reason_of_a_condition_is_a_refusal(tmp_path):
    """A text of the user's becomes one; conditions of ours come first."""
    extra = 'idioms=(mish_glu, spelled_out), conditions=(lambda m: "not today",)'
    path = write(tmp_path, MISH.replace("idioms=(mish_glu, spelled_out)", extra))
    harness = check(mish, randn(4, D), randn(4, D), patterns=[path])
    (found,) = (r for r in harness.report.refusals if r.what == "mish_glu")
    assert (found.code, found.text) == ("condition", "not today")
    harness = check(mish, randn(4, D), randn(4, 1), patterns=[path])
    assert "differ in shape" in reasons(harness)


REFUSED = {
    "not floating": (
        lambda g, u: F.mish(g) * u.to(torch.int64), MISH, "up is torch.int64, not a floating type",
    ),
    "a tensor": (lambda g, u: g * torch.sigmoid(u * g) * u, SWISH, "beta is not a constant"),
    "used elsewhere": (
        lambda g, u: (s := F.mish(g)) * u + s, MISH, "its intermediate s is used elsewhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("function", "text", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_gate_stays(function, text, reason, tmp_path):
    path = write(tmp_path, text)
    harness = check(function, randn(4, D), randn(4, D), patterns=[path])
    assert not any(node.target is load(path).op for node in harness.raised.nodes)
    assert reason in reasons(harness)


def test_mixed_dtypes_are_computed_in_the_wider_one(tmp_path):
    """The matcher looks through the cast; the op must not compute the gate in half precision."""
    path = write(tmp_path, MISH)
    gate = randn(4, D, dtype=torch.bfloat16).requires_grad_()
    up = randn(4, D, dtype=torch.float32).requires_grad_()
    harness = check_gradients(lambda g, u: F.mish(g.float()) * u, gate, up, patterns=[path])
    assert any(node.target is load(path).op for node in harness.raised.nodes)


EPS = 1e-3

#: Rows of length one.
L2 = '''
"""F.normalize with a weight."""
import torch
import torch.nn.functional as F
from coda_inductor import Pattern

def scale(sum_square, eps: float):
    return torch.rsqrt(sum_square.clamp(min=eps * eps))

def functional(x, weight, eps):
    return weight * F.normalize(x, dim=-1, eps=eps)

def bare(x, eps):
    return x / x.norm(dim=-1, keepdim=True).clamp_min(eps)

PATTERN = Pattern.norm("l2_norm", scale, (functional, bare))
'''


def l2(x, gamma):
    return F.normalize(x, dim=-1, eps=EPS) * gamma


def l2_behind_a_weight(x, gamma):
    """The spelling without a weight; gamma belongs to its input."""
    x = x * gamma
    return x / x.norm(dim=-1, keepdim=True).clamp_min(EPS)


def mlp(norm):
    """With rows that are bounded and rows that are not."""
    return lambda x, w, gamma, gate, up, down: F.linear(
        F.silu(F.linear(n := norm(F.linear(x, w), gamma), gate)) * F.linear(n, up), down
    )


def tensors():
    x = randn(2, 5, D)
    x[0] *= 1e-5  # below the bound
    x[1, 0] = 0
    shapes = (D, D), (D,), (HIDDEN, D), (HIDDEN, D), (D, HIDDEN)
    return tuple(t.requires_grad_() for t in (x, *(randn(*s) / s[-1] ** 0.5 for s in shapes)))


def test_it_waits_and_its_gradients_are_eagers(tmp_path, monkeypatch):
    """Each between products of its own, in one graph."""
    leave_custom_ops(monkeypatch, "64x32:1x1:co")
    first, second = mlp(l2), mlp(l2_behind_a_weight)
    harness = check_gradients(
        lambda given: [first(*given[0]), second(*given[1])], [tensors(), tensors()],
        patterns=[write(tmp_path, L2)],
    )  # fmt: skip
    assert harness.counts["l2_norm"] == harness.counts["l2_norm_backward"] == 2
    assert not any("l2_norm" in op for op in harness.ops())
    assert harness.report.near_misses == []


def test_the_gradient_equals_autograds_to_1e_10(tmp_path):
    """Of the op alone, its rows of zeros and at the bound's sides."""
    pattern = load(write(tmp_path, L2))
    x, _, gamma, *_ = tensors()
    dy = randn(2, 5, D)
    ours = torch.autograd.grad(pattern.call(x, gamma, EPS, x.dtype), (x, gamma), dy)
    eager = torch.autograd.grad(pattern.idioms[0](x, gamma, EPS), (x, gamma), dy)
    torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-10)


def negative(mean_square, eps: float):
    return -torch.rsqrt(mean_square + eps)


def steep(mean_square, eps: float):
    return 1 / (mean_square.sqrt() + eps)


def across_rows(mean_square, eps: float):
    return torch.rsqrt(mean_square.mean() + eps) + 0 * mean_square


def norm_scale(mean_square, eps: float):
    return torch.rsqrt(mean_square + eps)


@pytest.mark.parametrize(("scale", "idioms", "said"), [
    (lambda square, eps: torch.rsqrt(square + eps), (), "scale takes mean_square or sum_square"),
    (negative, (), "scale is not positive"),
    (across_rows, (), "not of each row by itself"),
    (steep, (), "be it at a row of zeros"),
    (norm_scale, (lambda x, weight: weight * x,), "an idiom takes x, eps and may take weight"),
])  # fmt: skip
def test_a_scale_or_an_idiom_that_does_not_do_is_refused(scale, idioms, said):
    with pytest.raises(PatternError, match=said):
        Pattern.norm("wrong", scale, idioms)


def test_a_scale_that_is_not_the_idioms_is_not_proven(tmp_path):
    with pytest.raises(PatternError, match="l2_norm"):
        patterns.load_file(write(tmp_path, L2.replace("eps * eps", "eps")))
