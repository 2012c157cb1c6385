# SPDX-License-Identifier: Apache-2.0
"""Growing epilogues: whatever elementwise work stands around a GEMM runs on its tile.

Each case is compared with eager in float64 and must be one fused GEMM that computed the expected
steps; refusals are in test_fuse_refusals.py, shapes and layouts in test_fuse_shapes.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, leave_custom_ops, randn, reasons
from torch import nn

from coda_inductor.fuse import driver
from coda_inductor.fuse.region import NoRegionError
from coda_inductor.pipeline import on_aten
from coda_inductor.refusal import refuse

M, N, K = 6, 10, 8


def fused(function, *args, **kwargs):
    """The program of the one GEMM of ``function``, which must agree with eager."""
    harness = check(function, *args, **kwargs)
    (site,) = harness.report.sites
    assert site.fused, site.reason
    return site.program


def matrices():
    return randn(M, K), randn(K, N)


# Name -> (function of the product, ops that the program must contain).
ELEMENTWISE = {
    "gelu": (F.gelu, {"erf"}),
    "gelu tanh": (lambda z: F.gelu(z, approximate="tanh"), {"tanh"}),
    "relu": (F.relu, {"relu"}),
    "relu squared": (lambda z: F.relu(z) ** 2, {"relu", "mul"}),
    "tanh": (torch.tanh, {"tanh"}),
    "silu": (F.silu, {"sigmoid", "mul"}),
    "sigmoid": (torch.sigmoid, {"sigmoid"}),
    "exp": (lambda z: (z * 0.1).exp(), {"exp"}),
    "exp2": (lambda z: torch.exp2(z * 0.1), {"exp2"}),
    "log": (lambda z: torch.log(z.abs() + 1), {"log", "abs"}),
    "log2": (lambda z: torch.log2(z * z + 1), {"log2"}),
    "erf": (torch.erf, {"erf"}),
    "sin and cos": (lambda z: z.sin() - z.cos(), {"sin", "cos", "sub"}),
    "clamp": (lambda z: z.clamp(-0.5, 1.5), {"maximum", "minimum"}),
    "clamp below": (lambda z: z.clamp(min=-0.5), {"maximum"}),
    "clamp above": (lambda z: z.clamp(max=0.5), {"minimum"}),
    "relu6": (F.relu6, {"minimum"}),
    "hardtanh": (F.hardtanh, {"maximum", "minimum"}),
    "hardswish": (F.hardswish, {"mul"}),
    "leaky relu": (lambda z: F.leaky_relu(z, 0.2), {"where"}),
    "softplus": (F.softplus, {"where", "exp"}),
    "elu": (F.elu, {"where"}),
    "selu": (F.selu, {"where"}),
    "mish": (F.mish, {"tanh"}),
    "neg": (torch.neg, {"neg"}),
    "abs": (torch.abs, {"abs"}),
    "square": (torch.square, {"mul"}),
    "cube": (lambda z: z**3, {"mul"}),
    "square root": (lambda z: (z.abs() + 1).sqrt(), {"sqrt"}),
    "to the half": (lambda z: (z.abs() + 1) ** 0.5, {"sqrt"}),
    "to the minus half": (lambda z: (z.abs() + 1) ** -0.5, {"rsqrt"}),
    "reciprocal": (lambda z: 1 / (z.abs() + 1), {"reciprocal"}),
    "to the minus one": (lambda z: (z.abs() + 1) ** -1, {"reciprocal"}),
    "scalar arithmetic": (lambda z: 3 - (z * 2 + 1) / 7, {"mul", "div"}),
    "integer scalars": (lambda z: (z + 5) * 3, {"add", "mul"}),
    "where": (lambda z: torch.where(z > 0, z, z * 0.01), {"gt", "where"}),
    "where with constants": (lambda z: torch.where(z <= 0.25, 1.0, z), {"le", "where"}),
    "comparisons": (
        lambda z: torch.where(z >= -1, z, 0.0) + torch.where(z < 0, 1.0, 2.0),
        {"ge", "lt", "where"},
    ),
    "masked fill": (lambda z: z.masked_fill(z < 0, float("-inf")), {"where"}),
    "masked by a product": (lambda z: z * (z > 0), {"gt"}),
    "two branches": (lambda z: torch.maximum(z.sin(), torch.minimum(z, z * z)), {"maximum"}),
    "alpha": (lambda z: torch.add(z, z.sin(), alpha=3), {"mul", "add"}),
    "subtract with alpha": (lambda z: torch.sub(z, z.sin(), alpha=-0.5), {"mul", "sub"}),
    "reverse subtract": (lambda z: torch.rsub(z, 2.0), {"sub"}),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_work_runs_on_the_tile(name):
    function, ops = ELEMENTWISE[name]
    program = fused(lambda a, b: function(a @ b), *matrices())
    assert ops <= {step.op for step in program.steps}
    assert len(program.stores) == 1


# Name -> (shape of the other operand, kind of operand that it must become).
BROADCASTS = {
    "vector": ((N,), "row"),
    "one row": ((1, N), "row"),
    "one row, 3-D": ((1, 1, N), "row"),
    "one column": ((2, M // 2, 1), "col"),
    "tile": ((2, M // 2, N), "tile"),
    "number": ((), "scalar"),
    "one element": ((1, 1), "scalar"),
}


@pytest.mark.parametrize("name", BROADCASTS)
def test_other_operands_broadcast(name):
    shape, kind = BROADCASTS[name]

    def function(a, b, other):
        return other - (a @ b).view(2, M // 2, N) * other

    program = fused(function, *matrices(), randn(*shape))
    assert [o.kind for o in program.operands] == [kind]


def test_column_of_a_matrix():
    program = fused(lambda a, b, c: (a @ b) * c, *matrices(), randn(M, 1))
    assert [o.kind for o in program.operands] == ["col"]


def test_operand_of_another_float_dtype_is_read_as_it_is():
    def function(a, b, other):
        return a @ b + other

    program = fused(function, *matrices(), randn(N, dtype=torch.float32))
    assert program.operands[0].dtype == "float32"


@pytest.mark.parametrize("shape", [(N,), (1, N), (M, N), (M, 1), ()], ids=str)
def test_addmm_adds_any_broadcast_of_its_bias(shape):
    fused(lambda a, b, c: torch.relu(torch.addmm(c, a, b)), *matrices(), randn(*shape))


@pytest.mark.parametrize("lead", [(), (M,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_with_any_leading_dimensions(lead, bias):
    linear = nn.Linear(K, N, bias=bias).double()
    harness = check(lambda x: torch.tanh(linear(x)) + 1, randn(*lead, K))
    assert all(site.fused for site in harness.report.sites)


def test_all_values_that_others_read_are_stored_once():
    def function(a, b):
        z = a @ b
        view = z.view(2, 3, N)
        return z, view.cumsum(0), view.relu().cumsum(1), z.relu(), z.sin() * 0.5

    program = fused(function, *matrices())
    assert program.stores[0].value == "acc"
    assert len(program.stores) == 3


def test_output_in_another_dtype_leaves_the_tile_unrounded():
    def function(a, b):
        return (a @ b).float() * 2

    a, b = randn(M, 512, dtype=torch.bfloat16), randn(512, N, dtype=torch.bfloat16)
    program = fused(function, a, b, tolerance=1e-2)
    assert [s.dtype for s in program.stores] == ["float32"]


def test_value_that_is_read_before_it_is_rounded_is_stored_wide():
    def function(a, b):
        z = (a @ b).float() * 3.0
        return z.cumsum(0), z.bfloat16().cumsum(0)

    a, b = randn(M, K, dtype=torch.bfloat16), randn(K, N, dtype=torch.bfloat16)
    program = fused(function, a, b, tolerance=3e-2)
    assert [s.dtype for s in program.stores] == ["float32"]


def test_value_that_is_also_read_rounded_is_stored_rounded():
    def function(a, b):
        z = torch.relu(a @ b)
        return z.cumsum(0), z.float().cumsum(0)

    a, b = randn(M, K, dtype=torch.bfloat16), randn(K, N, dtype=torch.bfloat16)
    program = fused(function, a, b, tolerance=3e-2)
    assert [s.dtype for s in program.stores] == ["bfloat16"]


REDUCTIONS = {
    "sum": lambda z, keep: z.sum(-1, keepdim=keep),
    "sum, positive dim": lambda z, keep: z.sum(z.dim() - 1, keepdim=keep),
    "mean": lambda z, keep: z.mean(-1, keepdim=keep),
    "amax": lambda z, keep: z.amax(-1, keepdim=keep),
}


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_row_reductions_leave_as_partials(name, keepdim, tiles, monkeypatch):
    if tiles > 1:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")

    def function(x, w):
        z = F.linear(x, w) - 3.0  # mostly negative: a maximum of 0 would be wrong
        return (
            z,
            REDUCTIONS[name](z, keepdim),
            REDUCTIONS[name](z.flatten(0, 1) * z.flatten(0, 1), keepdim),
        )

    program = fused(function, randn(2, 35, K), randn(70, K))
    assert [r.combine for r in program.reduces] == ["max" if name == "amax" else "add"] * 2


def test_one_sum_serves_all_its_readers():
    """A regression: LayerNorm's gradient and a bias's took the same sum over M twice."""

    def function(x, w):
        z = F.linear(x, w).relu()
        return z, z.sum(0), z.sum(0, keepdim=True) * 2, z.sum(-1), z.sum(1, keepdim=True) + 1

    harness = check(function, randn(6, 8), randn(16, 8))
    (site,) = harness.fused
    assert [(r.name, r.axis) for r in site.program.reduces] == [("part0", "col"), ("part1", "row")]


def test_reduction_of_a_half_tile_is_summed_in_float32():
    def function(a, b):
        z = a @ b
        return z, z.float().sum(-1), z.sum(-1)

    a, b = randn(M, K, dtype=torch.bfloat16), randn(K, 512, dtype=torch.bfloat16)
    fused(function, a, b, tolerance=3e-2)


@pytest.mark.parametrize("transposed", [True, False])
def test_both_weight_layouts(transposed):
    w = randn(N, K).t() if transposed else randn(K, N)
    assert w.is_contiguous() != transposed
    fused(lambda a, w: torch.relu(a @ w), randn(M, K), w)


def gate_up(x, wg, wu):
    return F.silu(F.linear(x, wg)) * F.linear(x, wu)


def test_gate_and_up_meet_in_one_tile():
    program = fused(gate_up, randn(2, 3, K), randn(N, K), randn(N, K))
    assert program.paired


def test_up_before_gate_meets_too():
    def function(x, wg, wu):
        up = F.linear(x, wu)
        return up * F.silu(F.linear(x, wg))

    assert fused(function, randn(2, 3, K), randn(N, K), randn(N, K)).paired


def test_any_function_of_two_products_is_a_pair():
    def function(x, wg, wu):
        g, u = x @ wg, x @ wu
        return torch.where(g > u, g, u.tanh() * 0.5)

    assert fused(function, randn(M, K), randn(K, N), randn(K, N)).paired


def test_gate_that_others_read_is_stored_and_loaded_by_up():
    def function(x, wg, wu):
        g = F.linear(x, wg)
        return F.silu(g) * F.linear(x, wu), g

    harness = check(function, randn(2, 3, K), randn(N, K), randn(N, K))
    assert [site.program.paired for site in harness.fused] == [False]
    assert [o.kind for o in harness.fused[0].program.operands] == ["tile"]


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True)], ids=str)
def test_gate_and_up_with_biases_meet_too(biases, monkeypatch):
    leave_custom_ops(monkeypatch)
    gate, up = (nn.Linear(K, N, bias).double() for bias in biases)
    harness = check(lambda x: F.silu(gate(x)) * up(x), randn(2, 3, K))
    (site,) = harness.fused
    assert site.program.paired
    assert [o.kind for o in site.program.operands] == ["row"] * sum(biases)


def test_gate_and_up_of_different_widths_are_no_pair():
    def function(x, wg, wu):
        return F.linear(x, wg).relu(), F.linear(x, wu).relu()

    harness = check(function, randn(M, K), randn(N, K), randn(N + 2, K))
    assert [site.program.paired for site in harness.fused] == [False, False]


def test_a_region_that_cannot_be_is_no_failure(monkeypatch):
    """The next candidate is tried, and with none left the reason is reported: strict raises not."""

    def none(*_):
        raise NoRegionError(refuse("epilogue-full", "more than 3 tiles would be stored"))

    a, b = matrices()
    monkeypatch.setattr(driver, "pair_with", none)
    assert check(lambda a, b: F.silu(a @ b), a, b).report.sites[0].fused
    monkeypatch.setattr(driver, "grow", none)
    assert "more than 3 tiles" in reasons(check(lambda a, b: F.silu(a @ b), a, b))


def test_only_what_is_read_once_is_a_residual():
    """The gradient of a GELU reads x twice; a mean that is taken away is no residual either."""

    def function(a, b, x, mean):
        return (a @ b) * (x + 0.5 * x**3), (a @ b) * (x - mean)

    harness = check(function, *matrices(), randn(M, N), randn(M, 1))
    assert harness.counts["residual"] == 0


def test_residual_is_counted_by_name():
    harness = check(lambda x, w: x + F.linear(x, w), randn(2, 3, K), randn(K, K))
    assert harness.counts == {"residual": 1}


def test_epilogue_without_a_named_pattern_is_counted_as_such():
    harness = check(lambda x, w: F.linear(x, w).relu(), randn(2, 3, K), randn(K, K))
    assert harness.counts == {"epilogue": 1}


CUSTOM = {
    "activation": lambda x, w, u: F.gelu(F.linear(x, w)) * 2,
    "pair": gate_up,
    "residual": lambda x, w, u: (x.sum() + F.linear(x, w)).relu(),
    "column": lambda x, w, u: F.linear(x, w) * x[..., :1],
    "statistics": lambda x, w, u: (F.linear(x, w), F.linear(x, w).amax(-1)),
    "sequence": lambda x, w, u: F.linear(F.linear(x, w).relu(), u.t()).tanh(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CUSTOM)
def test_custom_op_in_the_graph_computes_the_same(name, dynamic, monkeypatch):
    leave_custom_ops(monkeypatch)
    function = Weights(CUSTOM[name], randn(136, K), randn(136, K))
    harness = check(function, randn(2, 70, K), dynamic=dynamic)
    assert harness.ops()["coda_inductor.gemm_epilogue.default"] == len(harness.fused) > 0


def test_pass_is_idempotent(monkeypatch):
    leave_custom_ops(monkeypatch)
    harness = check(gate_up, randn(2, 3, K), randn(N, K), randn(N, K))
    before = str(harness.graph)
    on_aten(harness.graph, harness.record)
    assert str(harness.graph) == before
