# SPDX-License-Identifier: Apache-2.0
"""A norm of a user's own: its pattern file is proven, it waits like RMSNorm, forward and backward,
or stays for a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, leave_custom_ops, randn, reasons
from gates import write
from harness import Harness
from passes import codes

from coda_inductor import Pattern, PatternError, patterns
from coda_inductor.semantic.norms import NORMS, define_norm, rms_norm

pytestmark = pytest.mark.usefixtures("prove_here")

D, HIDDEN, EPS = 16, 24, 1e-3

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

#: RMSNorm with a bound in place of a sum.
BOUNDED = """
import torch
from coda_inductor import Pattern

def scale(mean_square, eps: float):
    return torch.rsqrt(torch.clamp(mean_square, min=eps))

def bounded(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=eps)) * weight

PATTERN = Pattern.norm("bounded_norm", scale, (bounded,))
"""


def l2(x, gamma):
    return F.normalize(x, dim=-1, eps=EPS) * gamma


def l2_bare(x):
    return x / x.norm(dim=-1, keepdim=True).clamp_min(EPS)


def bounded(x, gamma):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=0.5)) * gamma


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


def l2_behind_a_weight(x, gamma):
    """The spelling without a weight; gamma belongs to its input."""
    return l2_bare(x * gamma)


CASES = {
    "l2": (L2, l2, "l2_norm"),
    "bare": (L2, l2_behind_a_weight, "l2_norm"),
    "bounded": (BOUNDED, bounded, "bounded_norm"),
}


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_waits_and_its_gradients_are_eagers(name, custom, tmp_path, monkeypatch):
    text, norm, counted = CASES[name]
    if custom:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    harness = check_gradients(mlp(norm), *tensors(), patterns=[write(tmp_path, text)])
    assert harness.counts[counted] == harness.counts[f"{counted}_backward"] == 1
    assert harness.report.near_misses == []
    assert not any(counted in name for name in harness.ops())


def test_the_gradient_equals_autograds_to_1e_10(tmp_path):
    """Of the op alone, its rows of zeros and at the bound's sides."""
    for text in (L2, BOUNDED):
        (pattern,) = patterns.load_file(write(tmp_path, text))
        x, _, gamma, *_ = tensors()
        idiom = pattern.idioms[0]
        dy = randn(2, 5, D)
        ours = torch.autograd.grad(pattern.call(x, gamma, EPS, x.dtype), (x, gamma), dy)
        eager = torch.autograd.grad(idiom(x, gamma, EPS), (x, gamma), dy)
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-10)


def test_programs_are_those_of_rms_norm(tmp_path):
    """What the GEMMs compute is the same for every norm without a shift, and so are the keys."""

    def keys(norm, **options):
        harness = check_gradients(mlp(norm), *tensors(), **options)
        return [site.program.key for site in harness.fused]

    path = write(tmp_path, BOUNDED)
    assert keys(bounded, patterns=[path]) == keys(lambda x, g: F.rms_norm(x, (D,), g, EPS))


def test_an_edited_file_is_another_op(tmp_path):
    (first,) = patterns.load_file(write(tmp_path, L2))
    (second,) = patterns.load_file(write(tmp_path, L2.replace("Rows", "rows") + "\n"))
    (again,) = patterns.load_file(write(tmp_path, L2, "copy.py"))
    assert first.op is not second.op
    assert first.op is again.op
    assert NORMS[first.op].name == NORMS[second.op].name == "l2_norm"


REFUSED = {
    "no GEMM in front": (lambda x, w, g, a: F.linear(l2(x, g), a), "norm-input-no-gemm"),
    "read elsewhere": (
        lambda x, w, g, a: F.linear(n := l2(F.linear(x, w), g), a).sum() + n.sin(),
        "norm-read-elsewhere",
    ),
    "weight of rows": (
        lambda x, w, g, a: F.linear(l2(F.linear(x, w), x) * g, a),
        "norm-weight-shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_stays_for_a_reason(name, tmp_path):
    function, code = REFUSED[name]
    x, w, gamma, a, *_ = tensors()
    harness = check_gradients(function, x, w, gamma, a, patterns=[write(tmp_path, L2)])
    assert code in codes(harness)
    assert harness.counts["l2_norm"] == harness.counts["l2_norm_backward"] == 0


def test_it_is_disabled_by_its_names(tmp_path):
    path, args = write(tmp_path, L2), tensors()
    harness = check_gradients(mlp(l2), *args, patterns=[path], disable=["l2_norm_backward"])
    assert "disable" in reasons(harness)
    assert harness.counts["l2_norm"] == harness.counts["l2_norm_backward"] == 0


def test_in_float16_it_needs_the_option(tmp_path):
    path = write(tmp_path, L2)
    args = [t.detach().half() for t in tensors()]
    assert "float16-overflow" in codes(check(mlp(l2), *args, patterns=[path]))
    harness = check(mlp(l2), *args, patterns=[path], fp16_norms=True)
    assert harness.counts["l2_norm"] == 1


def test_a_dynamic_size_stays_dynamic(tmp_path):
    harness, graphs = Harness(patterns=[write(tmp_path, L2)]), set()
    compiled = torch.compile(mlp(l2), backend=harness, dynamic=True)
    _, *weights = (t.detach() for t in tensors())
    with torch.no_grad():
        for length in (5, 6, 9):
            x = randn(2, length, D)
            torch.testing.assert_close(compiled(x, *weights), mlp(l2)(x, *weights))
            graphs.add(harness.graphs)
    assert len(graphs) == 1


def of_other(square, eps: float):
    return torch.rsqrt(square + eps)


def negative(mean_square, eps: float):
    return -torch.rsqrt(mean_square + eps)


def across_rows(mean_square, eps: float):
    return torch.rsqrt(mean_square.mean() + eps) + 0 * mean_square


def steep(mean_square, eps: float):
    return 1 / (torch.sqrt(mean_square) + eps)


def fine(mean_square, eps: float):
    return torch.rsqrt(mean_square + eps)


def without_eps(x, weight):
    return weight * x


WRONG = {
    "another sum": (of_other, (), "scale takes mean_square or sum_square"),
    "negative": (negative, (), "scale is not positive"),
    "across rows": (across_rows, (), "not of each row by itself"),
    "no derivative at zero": (steep, (), "be it at a row of zeros"),
    "parameters": (fine, (without_eps,), "an idiom takes x, eps and may take weight"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_scale_or_an_idiom_that_does_not_do_is_refused(name):
    scale, idioms, said = WRONG[name]
    with pytest.raises(PatternError, match=said):
        Pattern.norm("wrong", scale, idioms)


def test_a_scale_that_is_not_the_idioms_is_not_proven(tmp_path):
    with pytest.raises(PatternError, match="l2_norm"):
        patterns.load_file(write(tmp_path, L2.replace("eps * eps", "eps")))


def test_the_bend_of_rms_norm_is_one():
    """Which is why its gradient reads none."""
    op = define_norm("bent_rms", lambda square, eps: torch.rsqrt(square + eps), ("eps",))
    x, gamma = randn(3, D), randn(D)
    y, scale, bend = op(x, gamma, EPS, x.dtype)
    torch.testing.assert_close(bend, torch.ones_like(bend))
    torch.testing.assert_close((y, scale), rms_norm(x, gamma, EPS, x.dtype))
