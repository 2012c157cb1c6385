# SPDX-License-Identifier: Apache-2.0
"""Norms between GEMMs: the same function, and nothing normalized is stored. RMSNorm forward and
backward (R1 to R4), LayerNorm in inference (R5), whose means are large beside deviations, so that a
mean in the wrong place shows. ``TILED`` cases leave the op itself, whose partials have tiles."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from checking import (
    SideBySide,
    Weights,
    check,
    check_gradients,
    check_sizes,
    leave_custom_ops,
    randn,
)
from harness import Harness
from passes import aten_graph, codes, run_pass

from coda_inductor.rewrite.norm.defer import defer_norms
from coda_inductor.semantic.norms import layer_norm

D, HIDDEN, WIDE = 16, 24, 80  # WIDE: a head, wider than all else
EPS = 1e-2  # large beside mean(x^2), so that an eps in the wrong place shows


def norm(x, w, gamma):
    return F.rms_norm(F.linear(x, w), (D,), gamma, EPS)


def residual(x, w, gamma, a):
    x = x + F.linear(x, w)
    return x + F.linear(F.rms_norm(x, (D,), gamma, EPS), a).sin()


def two_norms_of_one_stream(x, w, gamma, a, b):
    x = x + F.linear(x, w)
    first, second = (F.rms_norm(x, (D,), g, EPS) for g in (gamma, gamma * 2))
    return F.linear(first, a) * F.linear(second, b)


def scaled_rows(x, w, gamma, gate, a):
    """A gate of one value a row, whose product is newer than the one that it scales."""
    y = F.linear(x, w)
    return F.linear(F.rms_norm(x + F.linear(x, gate).sigmoid() * y, (D,), gamma, EPS), a)


def behind(function):
    """Of a norm and of more weights."""
    return lambda x, w, gamma, *weights: function(norm(x, w, gamma), *weights)


def gated(activation):
    return behind(lambda n, g, u, d: F.linear(activation(F.linear(n, g)) * F.linear(n, u), d))


def packed(x, w, gamma, gate_up, down):
    gate, up = F.linear(norm(x, w, gamma), gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


SQUARE, UP, DOWN = (D, D), (HIDDEN, D), (D, HIDDEN)
MLP, GATED = (UP, (HIDDEN,), DOWN), (UP, UP, DOWN)

# name: (function, shapes of its weights behind w and gamma, norms in it)
CASES = {
    "one GEMM": (behind(F.linear), (UP,), 1),
    "shared weight": (
        behind(lambda n, a, b: (
            F.linear(n, a).sin() + F.linear(n, b) + F.linear(n, a + 0).cos() * F.linear(n, a)
        )),
        (UP, UP), 1,
    ),
    "product read twice": (
        behind(lambda n, a: ((z := F.linear(n, a)).sin() * z.cumsum(0), z)), (UP,), 1,
    ),
    "head wider than 4 d": (behind(F.linear), ((WIDE, D),), 1),

    "residual": (residual, (SQUARE,), 1),
    "scaled rows": (scaled_rows, ((1, D), UP), 1),
    "two norms of one stream": (two_norms_of_one_stream, (UP, UP), 2),
    "SwiGLU": (gated(F.silu), GATED, 1),
    "packed gate and up": (packed, ((2 * HIDDEN, D), DOWN), 1),
    "GELU": (behind(lambda n, up, bias, d: F.linear(F.gelu(F.linear(n, up, bias)), d)), MLP, 1),
}  # fmt: skip
TILED = ["shared weight", "residual", "packed gate and up"]


def case(name: str) -> tuple[Weights, torch.Tensor, int]:
    """The function with weights, an input (2, 5, D) that wants a gradient, the number of norms."""
    function, shapes, norms = {**CASES, **LAYER_NORMS}[name]
    shapes = ((D,), (D,), *shapes) if name in LAYER_NORMS else ((D,), *shapes)
    weights = [randn(*s) / (s[-1] ** 0.5 if len(s) == 2 else 1) for s in (SQUARE, *shapes)]
    x = randn(2, 5, D) + 5 * (name in LAYER_NORMS)
    return Weights(function, *weights), x.requires_grad_(), norms


def cases(names) -> tuple[SideBySide, tuple[torch.Tensor, ...], int]:
    """All of them in one graph."""
    models, inputs, norms = zip(*map(case, names), strict=True)
    return SideBySide(models), inputs, sum(norms)


@pytest.mark.parametrize("custom", [False, True])
def test_gradients_are_eagers(custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    models, inputs, norms = cases(TILED if custom else CASES)
    harness = check_gradients(models, *inputs)
    assert harness.counts["rms_norm"] == harness.counts["rms_norm_backward"] == norms
    assert harness.report.near_misses == []
    # What is left of a norm are vectors: rstd, made of partials.
    assert harness.ops()["aten.rsqrt.default"] == norms
    assert not any("rms_norm" in name for name in harness.ops())


# What is frozen, by name of the parameter -> weights of column partials.
FROZEN = {(): 1, ("gamma",): 0, ("x", "w", "gamma"): 0, ("w", "gamma", "gate", "up", "down"): 0}


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_frozen_parameters_cost_nothing(frozen, monkeypatch):
    leave_custom_ops(monkeypatch)
    function, x, _ = case("SwiGLU")
    leaves = dict(zip(("w", "gamma", "gate", "up", "down"), function.weights, strict=True), x=x)
    for name in frozen:
        leaves[name].requires_grad_(False)
    harness = check_gradients(function, x)
    # Nothing in front of the norm is trained: dz is scaled for the weight, which does not count.
    assert harness.counts["rms_norm_backward"] == (not {"x", "w", "gamma"} <= {*frozen})
    columns = [r for s in harness.fused for r in s.program.reduces if r.axis == "col"]
    assert len(columns) == FROZEN[frozen]


@pytest.mark.parametrize(("name", "early"), [
    ("GELU", False), ("packed gate and up", True), ("head wider than 4 d", False),
])  # fmt: skip
def test_where_the_row_dot_is_taken(name, early, monkeypatch):
    """Partials of rowsum(dz * z) come with the activation's gradient, if z is at hand; a bias hides
    it. A wide head's z is not kept for that, nor is its gradient copied to be scaled: 2 GiB of
    Llama's."""
    leave_custom_ops(monkeypatch)
    function, x, _ = case(name)
    harness = check_gradients(function, x)
    wide = [s for s in harness.fused if s.shape[1] == HIDDEN]
    assert any(r.axis == "row" for s in wide for r in s.program.reduces) == early
    assert WIDE not in [n.meta["val"].shape[-1] for n in harness.saved]
    products = [n for n in harness.parts[1].nodes if n.target is torch.ops.aten.mul.Tensor]
    assert products
    assert not any(n.meta["val"].shape[-1] == WIDE for n in products)


def test_the_gemm_in_front_is_found_however_deep_the_stream_is():
    """A regression: with the residual on the right (GPT-2 writes it so), the search went through
    the whole stream first, gave up, and from the fifth layer on took an older GEMM for it."""

    def deep(x, first, *layers):
        x = F.linear(x, first)
        for v, o, up, down in zip(*[iter(layers)] * 4, strict=True):
            x = F.linear(F.linear(F.rms_norm(x, (D,), None, EPS), v).cumsum(1), o) + x
            x = F.linear(F.gelu(F.linear(F.rms_norm(x, (D,), None, EPS), up)), down) + x
        return x

    layers = 6
    weights = [randn(*s) / s[-1] ** 0.5 for s in (SQUARE, *[SQUARE, SQUARE, UP, DOWN] * layers)]
    assert check(Weights(deep, *weights), randn(2, 5, D)).counts["rms_norm"] == 2 * layers


def test_norm_moves_past_addmm_with_alpha_and_beta():
    function = behind(lambda n, a, bias: torch.addmm(bias, n, a.t(), alpha=0.5, beta=-3))
    shapes = (4, D), SQUARE, (D,), UP, (HIDDEN,)
    assert check(function, *(randn(*s) for s in shapes)).counts == {"rms_norm": 1}


def test_float16_needs_the_option():
    function, x, _ = case("one GEMM")
    args = copy.deepcopy(function).half(), x.detach().half().requires_grad_()
    harness = check_gradients(*args)
    assert harness.counts["rms_norm"] == 0
    assert "float16-overflow" in codes(harness)
    assert check_gradients(*args, fp16_norms=True).counts["rms_norm_backward"] == 1


def stream(x, w):
    """A residual stream whose mean a LayerNorm in front has computed."""
    return x + F.linear(F.layer_norm(x, (D,)).cumsum(0), w)


def layer(x, w, gamma, beta):
    return F.layer_norm(stream(x, w), (D,), gamma, beta, EPS)


def two_layer_norms(x, w, gamma, beta, up, bias, down):
    x = stream(x, w)
    n = F.layer_norm(x, (D,), gamma, beta, EPS)
    x = x + F.linear(F.gelu(F.linear(n, up, bias)), down)
    return F.linear(F.layer_norm(x, (D,), beta, gamma, EPS), up)


def rows_flattened(x, w, gamma, beta, up, down):
    """OPT: the second norm of a block reads the stream as a matrix."""
    x = stream(x, w)
    flat = x.flatten(0, 1)
    n = F.layer_norm(flat, (D,), gamma, beta, EPS)
    return (flat + F.linear(F.relu(F.linear(n, up)), down)).view(x.shape)


LAYER_NORMS = {
    "layer: neither": (
        lambda x, w, g, b, a: F.linear(layer(x, w, None, None), a) * (g + b)[0], (UP,), 1,
    ),
    "layer: a bias, and none": (
        lambda x, w, g, b, a, bias, c: (
            F.linear(n := layer(x, w, g, b), a, bias) * F.linear(n, c).tanh()
        ),
        (UP, (HIDDEN,), UP), 1,
    ),
    "layer: one GEMM": (lambda x, w, g, b, a: F.linear(layer(x, w, g, b), a), (UP,), 1),
    "layer: two norms": (two_layer_norms, MLP, 2),
    "layer: rows flattened": (rows_flattened, (UP, DOWN), 1),
}  # fmt: skip


@pytest.mark.parametrize(
    "names", [LAYER_NORMS, ["layer: one GEMM", "layer: two norms"]], ids=["all", "with the op"]
)
def test_values_of_layer_norms_are_eagers(names, monkeypatch):
    if names is not LAYER_NORMS:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    models, inputs, norms = cases(names)
    harness = check(models, *(x.detach() for x in inputs))
    assert harness.counts["layer_norm"] == norms
    assert harness.ops()["aten.rsqrt.default"] == norms + len(names)  # and those in front


def test_in_training_layer_norms_stay_for_that_reason_alone():
    """x-transformers multiplies by ``gamma + 1``, which inference takes for a weight."""

    def weight_behind(x, w, gamma):
        return F.linear(F.layer_norm(F.linear(x, w) + x, (D,)) * (gamma + 1), w)

    model = Weights(weight_behind, randn(D, D), randn(D))
    harness = check_gradients(model, randn(2, 5, D).requires_grad_())
    assert "layer-norm-training" in codes(harness)
    assert "norm-read-elsewhere" not in codes(harness)
    assert harness.counts["layer_norm"] == 0


def test_a_layer_norm_of_what_float32_was_added_to_stays():
    """In 16 bits its operand would round at the size of what was added."""

    def function(x, w, a):
        x = F.linear(x, w)
        n, x = F.layer_norm(x, (D,)).cumsum(0), x + x.float().sin()
        return n, F.linear(F.layer_norm(x, (D,)).bfloat16(), a)

    harness, shapes = Harness(reference=True), ((6, D), (D, D), (HIDDEN, D))
    harness.run(function, *(randn(*shape, dtype=torch.bfloat16) for shape in shapes))
    assert harness.counts["layer_norm"] == 0
    assert "layer-norm-wide" in codes(harness)


def test_a_dynamic_size_stays_dynamic():
    """Counting the rows of a norm once made its sizes numbers: every length compiled anew."""
    function, *_ = case("layer: rows flattened")
    check_sizes(function, (randn(2, 5, D),), (randn(2, 9, D),))


def three_of_one_stream(x, y, w, gamma, beta):
    """No GEMM makes the first one's input."""
    for _ in range(3):
        n = layer_norm(x, gamma, beta, 1e-5, torch.float64)[0]
        y = y + n @ w
        x = x + y.cumsum(0) @ w
    return x, y


def test_the_mean_of_a_deferred_layer_norm_is_the_pivot_of_the_next():
    """The nearest one: what was added since is rounded with the operand."""
    sizes = ((3, 4), (3, 4), (4, 4), (4,), (4,))
    graph = aten_graph(three_of_one_stream, *(randn(*s) for s in sizes))
    (why,) = run_pass(defer_norms, graph).report.refusals
    assert why.code == "norm-input-no-gemm"
    subs = graph.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor)
    first, second = [n.args[1] for n in subs if n.args[1].meta["val"].shape == (3, 1)][::2]
    assert first.target is operator.getitem  # of the norm that stays
    assert second.target is torch.ops.aten.add.Tensor
    assert first in second.all_input_nodes


NORMS = {
    "rms": lambda x, w: F.rms_norm(x, x.shape, w, 1e-6),
    "layer": lambda x, w: F.layer_norm(x, x.shape, w, w),
}
BETWEEN = (lambda h, other: F.silu(h) * other, lambda h, other: other + F.gelu(h))


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_one_token_without_a_dimension_of_tokens(norm):
    """Gamma's gradient is summed over rows, of which there are none."""

    def function(x, first, gate, up, second, down, y, w, b, gamma, out):
        z = norm(x, first)
        mlps = [norm(f(z @ gate, z @ up), second) @ down for f in BETWEEN]
        return *mlps, F.linear(norm(y + F.linear(y, w, b), gamma), out, b)

    shapes = (8,), (8,), (8, 2), (8, 2), (2,), (2, 4)
    shapes += (40,), (40, 40), (40,), (40,), (40, 40)  # torch has other ops for smaller ones
    check_gradients(function, *(randn(*shape).requires_grad_() for shape in shapes))
