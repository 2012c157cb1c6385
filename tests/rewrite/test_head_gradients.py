# SPDX-License-Identifier: Apache-2.0
"""Gradients of rotated queries and keys are one op, in every layout, or stay as they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import check_gradients
from rotating import WIDTH, B, D, H, Stack, T, count, inputs
from torch import nn

from coda_inductor.rewrite import head_gradients
from coda_inductor.runtime.head_gradients import HEAD_GRADIENT
from coda_inductor.semantic.norms import rms_norm_backward
from coda_inductor.semantic.rotary import rotate

KERNELS = {"reference": True, "gate": "always"}


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class Norm(nn.Module):
    """Hugging Face's: torch's own is not found where heads are turned before it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    """Grouped queries. ``norm``: of heads, "first" (Qwen 3), "turned" (Gemma 3) or "" (Llama).
    ``late``: heads are turned behind their rotation."""

    def __init__(self, norm="", late=False, turn=rotate_half, before=False):
        super().__init__()
        self.norm, self.late, self.turn = norm, late, turn
        self.input_norm = nn.RMSNorm(WIDTH) if before else nn.Identity()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * D, False) for n in (H, H // 2, H // 2))
        self.q_norm, self.k_norm = Norm(), Norm()
        self.o = nn.Linear(H * D, WIDTH, False)

    def heads(self, n, project, norm, cos, sin):
        x = project(n).view(*n.shape[:-1], -1, D)
        x = norm(x) if self.norm == "first" else x
        x, dim = (x, 2) if self.late else (x.transpose(1, 2), 1)
        x = norm(x) if self.norm == "turned" else x
        x = x * cos.unsqueeze(dim) + self.turn(x) * sin.unsqueeze(dim)
        return x.transpose(1, 2) if self.late else x

    def forward(self, x, cos, sin):
        n = self.input_norm(x)
        q, k = (
            self.heads(n, *parts, cos, sin)
            for parts in ((self.q, self.q_norm), (self.k, self.k_norm))
        )
        v = self.v(n).view(*n.shape[:-1], -1, D).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


LAYERS = {
    "Llama": {},
    "Qwen 3": {"norm": "first"},
    "Gemma 3": {"norm": "turned"},
    "turned late": {"late": True},
    "normed and turned late": {"norm": "first", "late": True},
    "neighbours": {"turn": rotate_every_two, "norm": "first"},
}


def model(layers=2, checkpointed=False, **how):
    return Stack((Layer(before=i > 0, **how) for i in range(layers)), checkpointed)


def ops(harness):
    return [node for node in harness.graph.nodes if node.target is HEAD_GRADIENT]


@pytest.fixture
def exact(monkeypatch):
    """What is proven in float64 holds in any dtype."""
    monkeypatch.setattr(head_gradients, "HALF", (torch.float64,))


@pytest.mark.parametrize("rows", [(1, T), (B, T)], ids=["shared", "own"])
@pytest.mark.parametrize("how", LAYERS)
def test_values_and_gradients(how, rows, exact):
    harness = check_gradients(model(**LAYERS[how]), *inputs(rows=rows), **KERNELS)
    made = ops(harness)
    assert harness.counts["head_gradient"] == len(made) == 4
    normed = bool(LAYERS[how].get("norm"))
    assert [(node.args[3] is not None, node.args[10]) for node in made] == [(normed, normed)] * 4
    assert not count(harness.graph, rms_norm_backward)
    assert sum(node.args[5] is not None for node in made) == 2  # behind the second layer's norm


@pytest.mark.parametrize("layers", [1, 3])
def test_as_many_as_projections(layers, exact):
    harness = check_gradients(model(layers, norm="first"), *inputs(), **KERNELS)
    assert harness.counts["head_gradient"] == 2 * layers


@pytest.mark.parametrize("how", ["Llama", "Qwen 3"])
def test_in_16_bits(how):
    layers = model(**LAYERS[how]).bfloat16()
    given = [t.detach().bfloat16() for t in inputs()]
    given[0].requires_grad_()
    harness = check_gradients(layers, *given, tolerance=6e-2, **KERNELS)
    assert harness.counts["head_gradient"] == 4


def test_under_autocast():
    """float32 weights: what is rotated is widened, for the tables are in float32."""
    given = [t.detach().float() for t in inputs()]
    layers = model(norm="first").float()

    def call(x, cos, sin):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layers(x, cos, sin)

    harness = check_gradients(
        call, given[0].requires_grad_(), *given[1:], tolerance=6e-2, **KERNELS
    )
    assert harness.counts["head_gradient"] == 4


def test_checkpointed(exact):
    harness = check_gradients(model(checkpointed=True, norm="first"), *inputs(), **KERNELS)
    assert harness.counts["head_gradient"] == 4


@pytest.mark.parametrize("how", ["Llama", "Qwen 3"])
def test_dynamic_sizes(how, exact):
    harness = check_gradients(model(**LAYERS[how]), *inputs(), dynamic=True, **KERNELS)
    assert harness.counts["head_gradient"] == 4


def test_a_frozen_weight_has_no_gradient(exact):
    layers = model(norm="first")
    for layer in layers.layers:
        layer.q_norm.weight.requires_grad_(False)
    harness = check_gradients(layers, *inputs(), **KERNELS)
    assert sorted(node.args[10] for node in ops(harness)) == [False, False, True, True]


def test_queries_that_something_else_reads(exact):
    """Normalized ones, before they are rotated: the norm has another gradient."""

    class Two(Layer):
        def forward(self, x, cos, sin):
            q = self.q_norm(self.q(x).view(B, T, H, D)).transpose(1, 2)
            z = q * cos.unsqueeze(1) + rotate_half(q) * sin.unsqueeze(1)
            return F.scaled_dot_product_attention(z, z, q)

    harness = check_gradients(Two().double(), *inputs(), **KERNELS)
    assert harness.counts["head_gradient"] == 1
    assert ops(harness)[0].args[3] is None


STAY = {
    "plain ops": {"gate": "always"},
    "small": {"reference": True},
    "disabled": {**KERNELS, "disable": ["head_gradient"]},
    "never": {"reference": True, "gate": "never"},
}


@pytest.mark.parametrize("why", STAY)
def test_options_under_which_it_stays(why, exact):
    harness = check_gradients(model(), *inputs(), **STAY[why])
    assert not harness.counts["head_gradient"]
    assert not ops(harness)


def test_other_dtypes_stay():
    assert not check_gradients(model(), *inputs(), **KERNELS).counts["head_gradient"]


def test_part_of_a_head_stays(exact):
    class Part(Layer):
        def heads(self, n, project, _norm, cos, sin):
            x = project(n).view(*n.shape[:-1], -1, D).transpose(1, 2)
            turned, rest = x[..., : D // 2], x[..., D // 2 :]
            turned = turned * cos[:, None] + rotate_half(turned) * sin[:, None]
            return torch.cat((turned, rest), -1)

    harness = check_gradients(Part().double(), *inputs(width=D // 2), **KERNELS)
    assert harness.counts["rotary"]
    assert not harness.counts["head_gradient"]


def test_tables_of_each_head_stay(exact):
    def function(x, w, cos, sin):
        q = (x @ w).view(B, T, H, D).transpose(1, 2)
        return F.scaled_dot_product_attention(q * cos + rotate_half(q) * sin, q, q)

    tables = torch.randn(2, 1, H, T, D, dtype=torch.float64)
    weight = torch.randn(WIDTH, H * D, dtype=torch.float64).requires_grad_()
    harness = check_gradients(function, inputs()[0], weight, *tables, **KERNELS)
    assert not harness.counts["head_gradient"]


def test_what_stays_is_decomposed(exact):
    harness = check_gradients(model(), *inputs(), **STAY["plain ops"])
    assert not any(count(harness.graph, op) for op in (rotate, rms_norm_backward))
