# SPDX-License-Identifier: Apache-2.0
"""Growing epilogues: whatever elementwise work stands around a GEMM runs on its tile, with eager's
values. Refusals are in test_fuse_refusals.py, shapes and layouts in test_fuse_shapes.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, leave_custom_ops, randn, reasons, side_by_side

from coda_inductor.lowering import driver
from coda_inductor.refusal import Refused, refuse

M, N, K = 6, 10, 8


def matrices():
    return randn(M, K), randn(K, N)


# Name -> (function of the product, ops that the program must contain).
ELEMENTWISE = {
    "gelu": (F.gelu, {"erf"}),
    "silu": (F.silu, {"sigmoid", "mul"}),
    "sin and cos": (lambda z: z.sin() - z.cos(), {"sin", "cos", "sub"}),
    "clamp": (lambda z: z.clamp(-0.5, 1.5), {"maximum", "minimum"}),
    "softplus": (F.softplus, {"where", "exp"}),
    "cube": (lambda z: z**3, {"mul"}),
    "to the half": (lambda z: (z.abs() + 1) ** 0.5, {"sqrt"}),
    "to the minus half": (lambda z: (z.abs() + 1) ** -0.5, {"rsqrt"}),
    "reciprocal": (lambda z: 1 / (z.abs() + 1), {"reciprocal"}),
    "scalar arithmetic": (lambda z: 3 - (z * 2 + 1) / 7, {"mul", "div"}),
    "comparisons": (
        lambda z: torch.where(z >= -1, z, 0.0) + torch.where(z < 0, (z <= -2) * z, 2.0),
        {"ge", "lt", "le", "where"},
    ),
    "masked fill": (lambda z: z.masked_fill(z < 0, float("-inf")), {"where"}),
    "masked by a product": (lambda z: z * (z > 0), {"gt"}),
    "two branches": (lambda z: torch.maximum(z.sin(), torch.minimum(z, z * z)), {"maximum"}),
    "alpha": (lambda z: torch.add(z, z.sin(), alpha=3), {"mul", "add"}),
    "reverse subtract": (lambda z: torch.rsub(z, 2.0), {"sub"}),
}


def test_elementwise_work_runs_on_the_tile():
    each = [lambda a, b, f=f: f(a @ b) for f, _ in ELEMENTWISE.values()]
    function, tensors = side_by_side(each, (M, K), (K, N))
    sites = check(function, *tensors).report.sites
    for (name, (_, ops)), site in zip(ELEMENTWISE.items(), sites, strict=True):
        assert site.fused, f"{name}: {site.reason}"
        assert ops <= {step.op for step in site.program.steps}, name
        assert len(site.program.stores) == 1, name


# Name -> (shape of the other operand, kind of operand that it must become).
BROADCASTS = {
    "vector": ((N,), "row"),
    "one row": ((1, N), "row"),
    "one column": ((2, M // 2, 1), "col"),
    "tile": ((2, M // 2, N), "tile"),
    "number": ((), "scalar"),
}


def test_other_operands_broadcast():
    """Each of another product: a factor, and the bias of addmm."""
    factors = [randn(*shape, dtype=torch.float32) for shape, _ in BROADCASTS.values()]
    biases = [randn(*shape) for shape in ((1, N), (M, N), (M, 1), ())]

    def function(a, bs, factors, biases):
        bs = iter(bs)
        products = [other - (a @ next(bs)).view(2, M // 2, N) * other for other in factors]
        return products, [torch.relu(torch.addmm(c, a, next(bs))) for c in biases]

    a, bs = randn(M, K), [randn(K, N) for _ in (*factors, *biases)]
    sites = check(function, a, bs, factors, biases).report.sites
    assert all(site.fused for site in sites), [site.reason for site in sites]
    for (name, (_, kind)), site in zip(BROADCASTS.items(), sites[: len(factors)], strict=True):
        operands = [(o.kind, o.dtype) for o in site.program.operands]
        assert operands == [(kind, "float32")], name


def test_all_values_that_others_read_are_stored_once():
    def function(a, b):
        z = a @ b
        view = z.view(2, 3, N)
        return z, view.cumsum(0), view.relu().cumsum(1), z.relu(), z.sin() * 0.5

    (site,) = check(function, *matrices()).fused
    program = site.program
    assert program.stores[0].value == "acc"
    assert len(program.stores) == 3


# Name -> (function of the product, what reads it, dtype of the one tile that is stored).
STORED = {
    "unrounded": (lambda z: z.float() * 3, lambda y: (y, y.bfloat16().cumsum(0)), "float32"),
    "also read rounded": (torch.relu, lambda y: (y.cumsum(0), y.float().cumsum(0)), "bfloat16"),
    "in two half types": (torch.sigmoid, lambda y: (y, y.half()), "float32"),
    "then widened": (lambda z: z.sigmoid().float(), lambda y: (y.amax(1), y.flip(0)), "bfloat16"),
}


def test_a_value_is_stored_as_its_readers_have_it():
    """Unrounded if one reads it so, and no wider than the value is. Each of its own product."""
    each = [lambda a, b, f=f, of=of: of(f(a @ b)) for f, of, _ in STORED.values()]
    function, tensors = side_by_side(each, (M, K), (K, N))
    sites = check(function, *(t.bfloat16() for t in tensors), tolerance=3e-2).fused
    stored = [[store.dtype for store in site.program.stores] for site in sites]
    assert stored == [[dtype] for _, _, dtype in STORED.values()]


#: What combines partials -> a reduction.
REDUCTIONS = (
    ("add", lambda z, keep: z.mean(z.dim() - 1, keepdim=keep)),
    ("max", lambda z, keep: z.amax(-1, keepdim=keep)),
)


@pytest.mark.parametrize("tiles", [1, 3])
def test_row_reductions_leave_as_partials(tiles, monkeypatch):
    if tiles > 1:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")

    def reduced(x, w, reduce):
        z = F.linear(x, w) - 3.0  # mostly negative: a maximum of 0 would be wrong
        squares = z.flatten(0, 1) * z.flatten(0, 1)
        return z, reduce(z, True), reduce(squares, False)

    each = [lambda x, w, r=reduce: reduced(x, w, r) for _, reduce in REDUCTIONS]
    function, tensors = side_by_side(each, (2, 35, K), (70, K))
    sites = check(function, *tensors).fused
    combined = [[r.combine for r in site.program.reduces] for site in sites]
    assert combined == [[how] * 2 for how, _ in REDUCTIONS]


def test_gate_and_up_that_are_no_pair():
    """A gate that others read is stored, and loaded by up; layouts of weights may differ."""

    def gated(x, wg, wu):
        g = x @ wg
        return F.silu(g) * (x @ wu), g

    harness = check(gated, *matrices(), randn(K, N))
    assert [site.program.paired for site in harness.fused] == [False]
    assert [o.kind for o in harness.fused[0].program.operands] == ["tile"]
    harness = check(lambda *of: gated(*of)[0], *matrices(), randn(N, K).t())
    assert not any(site.program.paired for site in harness.fused)


def test_a_region_that_cannot_be_is_no_failure(monkeypatch):
    """The next candidate is tried, and with none left the reason is reported: strict raises not."""

    def none(*_):
        raise Refused(refuse("kernel-form", "more than 3 tiles would be stored"))

    a, b = matrices()
    monkeypatch.setattr(driver, "find_pair", none)
    assert check(lambda a, b: F.silu(a @ b), a, b).report.sites[0].fused
    monkeypatch.setattr(driver, "grow", none)
    assert "more than 3 tiles" in reasons(check(lambda a, b: F.silu(a @ b), a, b))


FULL = [
    (3.7, torch.int64), (-3.7, torch.int32), (-1, torch.uint8), (2.5, torch.bool), (0, torch.bool),
    (0.1, torch.bfloat16), (0.1, torch.float16), (1e6, torch.float16), (0.1, torch.float32),
    (0.1, torch.float64), (math.inf, torch.float32), (True, torch.float32),
]  # fmt: skip


def test_constants_have_their_dtype():
    def function(x, ws):
        found = [
            (x @ w) * torch.full((), n, dtype=d) for (n, d), w in zip(FULL, ws[1:], strict=True)
        ]
        return found, (x @ ws[0]) * torch.scalar_tensor(*FULL[0][:1], dtype=FULL[0][1])

    harness = check(function, randn(6, 8), [randn(8, 10) for _ in range(len(FULL) + 1)])
    assert len(harness.fused) == len(FULL) + 1


def test_a_cast_that_narrows_float64_rounds():
    """Programs of float64 GEMMs do not: in front of a norm it was as if there were none."""

    def function(x, w, g):
        z = (F.linear(x, w)).float().double()
        y = F.linear(x, w) + (x * g).bfloat16().double()
        return z * g + 1, F.rms_norm(z, (8,), g, 1e-2), y

    check(function, randn(6, 8), randn(8, 8), randn(8), tolerance=1e-12)
    check_gradients(function, *(randn(*n).requires_grad_() for n in ((6, 8), (8, 8), (8,))))
