# SPDX-License-Identifier: Apache-2.0
"""The semantic ops: right values, right gradients for every mask, and what torch asks of an op."""

import itertools

import pytest
import torch
from checking import randn, swiglu
from zoo.float8 import needs_scaled_mm

from coda_inductor import patterns
from coda_inductor.semantic import experts, loss
from coda_inductor.semantic.define import DEFINITIONS
from coda_inductor.semantic.fp8 import fp8_linear, quantize, scaled_mm
from coda_inductor.semantic.norms import NORMS, rms_norm
from coda_inductor.semantic.rotary import rotate, rotate_heads, rotate_pairs

D, EPS = 6, 1e-2
swiglu_backward = DEFINITIONS[swiglu].gradient
clamped = patterns.load_file(patterns.builtin_folder() / "clamped_swiglu.py")[0].op
clamped_backward = DEFINITIONS[clamped].gradient


GRADED = {
    "swiglu": (swiglu, [(2, 3, D)] * 2),
    "rms_norm": (lambda x, w: rms_norm(x, w, EPS, x.dtype)[0], [(2, 3, D), (D,)]),
    "rms_norm of a row": (lambda x, w: rms_norm(x, w, EPS, x.dtype)[0], [(D,), (D,)]),
    "rms_norm without a weight": (lambda x: rms_norm(x, None, EPS, x.dtype)[0], [(2, 3, D)]),
}


def test_the_gradient_of_a_row_of_each_group():
    """A sum over its rows, of any width; what rows of no group hold is in none."""
    x, ids = randn(3, 12), torch.tensor([0, 0, 2, 2, 2, 2])
    dy, offsets = randn(6, 12), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    dy[5] = torch.nan
    found = torch.autograd.grad(experts.group_rows(x.requires_grad_(), ids, offsets), x, dy)[0]
    torch.testing.assert_close(found, torch.stack([dy[:2].sum(0), 0 * x[0], dy[2:5].sum(0)]))


def test_a_kernel_casts_no_product_to_16_bits():
    """Autocast is in the graph already, where it is on."""
    a, b = torch.randn(16, 8), torch.randn(2, 8, 24)
    with torch.autocast("cpu"):
        result = experts.grouped_mm(a, b, torch.tensor([0, 5, 16], dtype=torch.int32), None)
    torch.testing.assert_close(result, torch.cat([a[:5] @ b[0], a[5:] @ b[1]]))


@pytest.mark.parametrize(("function", "shapes"), GRADED.values(), ids=GRADED)
def test_gradients(function, shapes):
    """For each choice of what wants one."""
    for mask in itertools.product([True, False], repeat=len(shapes)):
        if any(mask):
            leaves = [randn(*s).requires_grad_(w) for s, w in zip(shapes, mask, strict=True)]
            assert torch.autograd.gradcheck(function, leaves)


def test_dtypes_of_mixed_inputs():
    """Half inputs, a wide weight: statistics and weight's gradient are wide, the rest is not; no
    gradient of statistics is offered."""
    x = randn(3, D, dtype=torch.bfloat16).requires_grad_()
    weight = randn(D, dtype=torch.float32).requires_grad_()
    y, rstd = rms_norm(x, weight, EPS, torch.bfloat16)
    assert (y.dtype, rstd.dtype) == (torch.bfloat16, torch.float32)
    assert not rstd.requires_grad
    y.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


def examples(dtype):
    x, weight, up = (randn(*s, dtype=dtype) for s in ((2, 3, D), (D,), (3, 2, D)))
    up = up.transpose(0, 1)  # gradients may lie in memory in another way than x
    _, rstd = rms_norm(x, weight, EPS, dtype)
    return {
        rms_norm: (x.requires_grad_(), weight.requires_grad_(), EPS, dtype),
        swiglu: (x, up.requires_grad_()),
        NORMS[rms_norm].backward: (
            up.detach(), x.detach(), weight.detach(), rstd.detach(), [True] * 2,
        ),
        swiglu_backward: (up.detach(), x.detach(), up.detach(), [True, False]),
        clamped: (x, up, 1.7, 7.0),
        clamped_backward: (up.detach(), x.detach(), up.detach(), 1.7, 7.0, [True, False]),
        **loss_examples(dtype),
        **expert_examples(dtype),
        rotate: (x, *randn(2, 3, D, dtype=dtype), D // 2, False, False, False, dtype),
        rotate_heads: (
            x.detach(), *randn(2, 2, 3, 1, D, dtype=dtype), *randn(2, 6, D, dtype=dtype),
            *(D // 2, False, False, False, dtype),
        ),
        rotate_pairs: (x, torch.polar(*torch.ones(2, 3, D // 2).double()), dtype),
    }  # fmt: skip


def loss_examples(dtype):
    logits, target, how = randn(6, D, dtype=dtype), torch.arange(6) % D, (1, 0.1, "mean")
    dloss, lse, number = loss.cross_entropy(logits, target, *how, dtype)
    return {
        loss.row_logsumexp: (logits,),
        loss.row_entropy: (logits, lse),
        loss.entropy: (logits.clone().requires_grad_(), dtype),
        loss.entropy_backward: (dloss.expand(6), logits, lse, loss.entropy(logits, dtype)[2]),
        loss.cross_entropy: (logits.clone().requires_grad_(), target, *how, dtype),
        loss.cross_entropy_backward: (dloss, logits, target, lse, number, *how),
    }


def expert_examples(dtype):
    x, weight, down = (randn(*s, dtype=dtype) for s in ((4, 16), (3, 32, 16), (3, 16, 16)))
    ids, w = torch.tensor([0, 2, 2, 0, 3, 2, 0, 0]), randn(4, 2, dtype=dtype)
    rows, perm, inverse, offsets = experts.route(ids, 3, 2)
    sorted_ = rows, perm, inverse, offsets
    x, w, weight = (t.requires_grad_() for t in (x, w, weight))
    return {
        experts.grouped_mm: (x.detach(), down.mT, offsets, rows),
        experts.group_rows: (
            randn(3, 12, dtype=dtype).requires_grad_(), ids.sort()[0].clamp(max=2), offsets,
        ),
        experts.experts_up: (x, rows, inverse, offsets, [weight.mT], 2, 2),
        experts.experts_down: (randn(8, 16, dtype=dtype), w, *sorted_, down.mT, 2),
        experts.ROUTE: (ids, 3, 2),
        experts.COMBINE: (randn(8, 16, dtype=dtype), w.detach(), inverse, offsets, 2),
        experts.WGRAD: (x.detach(), rows, [randn(8, 16, dtype=dtype)], offsets, True),
    }  # fmt: skip


def test_fp8_ops_are_what_torch_asks_of_one():
    """But for the comparison of inputs before and after, which torch has for no FP8 tensor."""
    checks = ["test_faketensor", "test_autograd_registration"]
    x, e4m3 = randn(32, 64, dtype=torch.bfloat16), torch.float8_e4m3fn
    for dims in ([], [0], [1]):
        torch.library.opcheck(quantize, (x, dims, e4m3, True, False), test_utils=checks)
    needs_scaled_mm()
    a, inverse = quantize(x, [1], e4m3, True, False)
    for after in (False, True):
        given = (a, a.t(), inverse, inverse.t(), torch.bfloat16, not after, after)
        torch.library.opcheck(scaled_mm, given, test_utils=checks)
    weight, scale = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.ones(16, 1)
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    torch.library.opcheck(fp8_linear, (x, weight, scale, None, False), test_utils=checks)


WIDE = [op for op in DEFINITIONS if op not in (quantize, scaled_mm, fp8_linear)]
WIDE += [experts.ROUTE, experts.COMBINE, experts.WGRAD]


@pytest.mark.parametrize("op", WIDE, ids=lambda op: op.__name__)
def test_op_is_what_torch_asks_of_one(op):
    """In 16 bits: of results that are wider than operands."""
    checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
    torch.library.opcheck(op, examples(torch.bfloat16)[op], test_utils=checks)
