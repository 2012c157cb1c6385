# SPDX-License-Identifier: Apache-2.0
"""Queries and keys leave their projection normalized head by head, and rotated where they are: in
every spelling, forward and backward, or for the reason that is given not at all."""

from __future__ import annotations

import functools

import passes
import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn
from passes import aten_graph, codes, run_pass
from torch import nn
from torch.utils.checkpoint import checkpoint

from coda_inductor.rewrite.head_norms import norm_rows
from coda_inductor.semantic import rms_norm
from coda_inductor.semantic.norms import rms_norm_heads

B, T, H, D, WIDTH = 2, 6, 4, 8, 24


def rotate(x, cos, sin):
    turned = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)
    return x * cos + turned * sin


class Norm(nn.Module):
    """Eps, and a weight that is used as it is (Qwen), as 1 + weight (Gemma), or not there."""

    def __init__(self, form="plain", eps=1e-6, width=D):
        super().__init__()
        self.form, self.eps = form, eps
        self.weight = None if form == "none" else nn.Parameter(randn(width))

    def forward(self, x):
        n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.form == "none":
            return n
        return n * (self.weight if self.form == "plain" else 1.0 + self.weight)


class Layer(nn.Module):
    """Grouped queries; ``order``: a norm before the transpose (Qwen 3) or behind it (Gemma 3)."""

    def __init__(self, form="plain", order="before", rotary=True, bias=False, heads=(H, H // 2)):
        super().__init__()
        self.order, self.rotary = order, rotary
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * D, bias) for n in (*heads, heads[1]))
        self.q_norm, self.k_norm = Norm(form), Norm(form, 0.25)
        self.o = nn.Linear(heads[0] * D, WIDTH)

    def heads(self, z, norm, cos, sin):
        z = z.view(*z.shape[:-1], -1, D)
        z = norm(z.transpose(1, 2)) if self.order == "behind" else norm(z).transpose(1, 2)
        return rotate(z, cos, sin) if self.rotary else z

    def forward(self, x, cos, sin):
        q = self.heads(self.q(x), self.q_norm, cos, sin)
        k = self.heads(self.k(x), self.k_norm, cos, sin)
        v = self.v(x).view(*x.shape[:-1], -1, D).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Model(nn.Module):
    """``normed``: the second layer and later ones stand behind a norm, which is deferred."""

    def __init__(self, layers=2, normed=False, checkpointed=False, **how):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**how) for _ in range(layers)).double()
        self.norms = nn.ModuleList(
            Norm(width=WIDTH) if normed and i else nn.Identity() for i in range(layers)
        )
        self.checkpointed = checkpointed

    def forward(self, x, cos, sin):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            n = norm(x)
            if self.checkpointed:
                x = x + checkpoint(layer, n, cos, sin, use_reentrant=False)
            else:
                x = x + layer(n, cos, sin)
        return x


def inputs():
    return randn(B, T, WIDTH).requires_grad_(), randn(T, D), randn(T, D)


def count(graph, target) -> int:
    return sum(node.target is target for node in graph.nodes)


def programs(harness):
    return [site.program for site in harness.fused if site.program.head]


@pytest.mark.parametrize("form", ["plain", "one more", "none"])
@pytest.mark.parametrize("order", ["before", "behind"])
def test_inference(order, form):
    harness = check(Model(2, order=order, form=form), *inputs())
    assert harness.counts["head_norm"] == harness.counts["rotary"] == 4
    assert not count(harness.graph, rms_norm_heads)
    kinds = ["table"] * 2 if form == "none" else ["row", "row", "table", "table"]
    assert [sorted(o.kind for o in p.operands) for p in programs(harness)] == [kinds] * 4
    assert not any(code.startswith("heads") for code in codes(harness))


@pytest.mark.parametrize("form", ["plain", "one more", "none"])
@pytest.mark.parametrize("order", ["before", "behind"])
def test_gradients(order, form):
    harness = check_gradients(Model(2, order=order, form=form), *inputs())
    assert harness.counts["head_norm"] == harness.counts["rotary"] == 4
    assert [len(p.stores) for p in programs(harness)] == [2] * 4  # what was normalized as well


def test_training_computes_statistics_in_the_backward_pass_only():
    """One value a head, in the kernel that reads what was normalized anyway."""
    harness = check_gradients(Model(2), *inputs())
    forward, backward = map(harness.ops, harness.parts)
    assert forward["aten.rsqrt.default"] == 4  # in the sites, which a CPU runs op by op
    assert backward["aten.rsqrt.default"] == 4
    saved = [node.meta["val"].shape for node in harness.saved]
    assert not any(shape[-1:] == (1,) for shape in saved)


def test_behind_a_deferred_norm_and_a_bias():
    harness = check_gradients(Model(3, normed=True, bias=True), *inputs())
    assert harness.counts["head_norm"] == 6
    kinds = [sorted(o.kind for o in p.operands) for p in programs(harness)]
    assert kinds[2:] == [["col", *["row"] * 4, "table", "table"]] * 4


def test_without_a_rotation():
    harness = check_gradients(Model(2, rotary=False), *inputs())
    assert harness.counts["head_norm"] == 4
    assert not harness.counts["rotary"]
    assert [[o.kind for o in p.operands] for p in programs(harness)] == [["row"]] * 4


def test_one_head():
    harness = check_gradients(Model(1, heads=(1, 1)), *inputs())
    assert harness.counts["head_norm"] == 2


def test_dynamic_sizes():
    harness = check_gradients(Model(2), *inputs(), dynamic=True)
    assert harness.counts["head_norm"] == harness.counts["rotary"] == 4


def test_in_a_checkpoint():
    harness = check_gradients(Model(2, checkpointed=True), *inputs())
    assert harness.counts["head_norm"] == harness.counts["rotary"] == 4


@pytest.mark.parametrize("name", ["head_norm", "rms_norm", "head_norms"])
def test_disabled(name):
    harness = check_gradients(Model(1), *inputs(), disable=(name,))
    assert not harness.counts["head_norm"]
    assert not programs(harness)


def test_unfused_nothing_is_left_of_it():
    """No gain, and the same kernels as without the rewrite."""
    graphs = [
        check(Model(1), *inputs(), disable=disabled).ops()
        for disabled in (("fuse",), ("fuse", "head_norms"))
    ]
    names = ("view", "permute", "alias", "unsqueeze")
    left, right = (
        {op: n for op, n in ops.items() if not any(name in op for name in names)} for ops in graphs
    )
    assert left == right


def test_in_16_bits_the_sum_is_of_what_is_stored():
    """In training what is normalized is stored, and its gradient sums it as memory holds it."""
    x, cos, sin = inputs()
    args = x.detach().bfloat16().requires_grad_(), cos.bfloat16(), sin.bfloat16()
    harness = check_gradients(Model(1).bfloat16(), *args, reference=True)
    assert harness.counts["head_norm"] == 2
    for program in programs(harness):
        made = {step.name: step for step in program.steps}
        (total,) = (step for step in program.steps if step.op == "head_sum")
        rounded = {made[arg].op for arg in made[total.args[0]].args}
        assert rounded == {"round_bfloat16"}


class Wide(Norm):
    """Computed in float32 and rounded at the end, by a weight in 16 bits, as Gemma's."""

    def forward(self, x):
        wide = x.float()
        n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (n * (1.0 + self.weight.float())).type_as(x)


@pytest.mark.parametrize("order", ["before", "behind"])
def test_what_is_rounded_at_the_end_is_rotated_too(order):
    model = Model(1, order=order)
    model.layers[0].q_norm = Wide()
    x, cos, sin = inputs()
    args = x.detach().bfloat16().requires_grad_(), cos.bfloat16(), sin.bfloat16()
    harness = check_gradients(model.bfloat16(), *args)
    assert harness.counts["head_norm"] == harness.counts["rotary"] == 2
    stored = [[store.dtype for store in program.stores] for program in programs(harness)]
    assert stored == [["bfloat16"] * 2] * 2


def test_torchs_own_norm_behind_the_transpose_says_what_helps():
    """Its result is laid out anew, which a reader may count on."""

    def function(order, x, w, weight):
        z = (x @ w).view(B, T, H, D)
        z = z.transpose(1, 2) if order == "behind" else z
        n = F.rms_norm(z, (D,), weight, 1e-6)
        return F.scaled_dot_product_attention(n, n, n)

    args = randn(*X), randn(*W), randn(D)
    before = check(functools.partial(function, "before"), *args)
    behind = check(functools.partial(function, "behind"), *args)
    assert (before.counts["head_norm"], behind.counts["head_norm"]) == (1, 0)
    assert "result-layout" in codes(behind)
    assert "result-layout" not in codes(before)


def of_product(eps):
    def function(x, w, weight):
        return rms_norm((x @ w).view(B, T, H, D), weight, eps, x.dtype)[0]

    return function


product = of_product(1e-6)


X, W = (B * T, WIDTH), (WIDTH, H * D)


def test_a_second_run_does_nothing():
    graph = aten_graph(product, randn(*X), randn(*W), randn(D))
    run_pass(norm_rows, graph)
    once = str(graph)
    assert count(graph, rms_norm_heads) == 1
    assert not run_pass(norm_rows, graph).report.refusals
    assert str(graph) == once


def test_eps_is_part_of_the_kernel_and_the_weight_is_not():
    x, w, *weights = randn(*X), randn(*W), randn(D), randn(D)
    runs = [check(of_product(e), x, w, g) for g in weights for e in (1e-6, 1e-2)]
    keys = [site.program.key for harness in runs for site in harness.fused]
    assert keys[0] == keys[2] != keys[1] == keys[3]


refused = functools.partial(passes.refused, norm_rows)


def test_what_no_gemm_makes():
    def function(x, weight):
        return rms_norm(x.view(B, T, H, D), weight, 1e-6, x.dtype)[0]

    assert refused(function, randn(B, T, H * D), randn(D)) == {"heads-no-gemm"}


def test_what_no_epilogue_makes():
    def function(x, w, weight):
        z = (x @ w).cumsum(0).view(B, T, H, D)
        return rms_norm(z, weight, 1e-6, x.dtype)[0]

    assert refused(function, randn(*X), randn(*W), randn(D)) == {"heads-no-gemm"}


@pytest.mark.parametrize("shape", [(B, T, H * D), (B * T, 1, H * D)])
def test_a_norm_of_rows_is_none_of_heads(shape):
    def function(x, w, weight):
        return rms_norm((x @ w).view(shape), weight, 1e-6, x.dtype)[0]

    assert not refused(function, randn(*X), randn(*W), randn(H * D))


def test_statistics_that_somebody_reads():
    def function(x, w, weight):
        return rms_norm((x @ w).view(B, T, H, D), weight, 1e-6, x.dtype)

    assert refused(function, randn(*X), randn(*W), randn(D)) == {"norm-statistics-read"}


def test_a_result_that_nobody_reads():
    def function(x, w, weight):
        return rms_norm((x @ w).view(B, T, H, D), weight, 1e-6, x.dtype)[1]

    assert refused(function, randn(*X), randn(*W), randn(D)) == {"not-read"}


def test_projections_that_stay_unfused():
    args = randn(*X), randn(*W), randn(D)
    assert refused(product, *args, gate="never") == {"gate-never"}
