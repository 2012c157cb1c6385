# SPDX-License-Identifier: Apache-2.0
"""The prover: what is equal is proven, what is not is refuted, and the difference is shown."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F

from coda_inductor import Pattern, PatternError
from coda_inductor.patterns import equal
from coda_inductor.patterns.equal import difference
from coda_inductor.patterns.formulas import FORMULAS, Row, expression
from coda_inductor.patterns.prove import prove
from coda_inductor.patterns.rules import RULES
from coda_inductor.semantic.gates import swiglu_backward_definition, swiglu_definition
from coda_inductor.semantic.norms import rms_norm_backward_definition, rms_norm_definition

G, U, DY = sympy.symbols("gate up dy", real=True)


def of(function, **more):
    """The expression of a gate."""
    return expression(function, {"gate": G, "up": U, **more})


def exponentials_of_mish(gate, up):
    w = torch.exp(gate)
    n = w * (w + 2)
    return gate * n / (n + 2) * up


def tanh_gelu(gate, up):
    inner = 0.7978845608028654 * (gate + 0.044715 * torch.pow(gate, 3))
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


EQUAL = {
    "mish": (
        lambda gate, up: F.mish(gate) * up,
        lambda gate, up: up * (gate * torch.tanh(F.softplus(gate))),
    ),
    "mish in exponentials": (lambda gate, up: F.mish(gate) * up, exponentials_of_mish),
    "log1p": (
        lambda gate, up: F.softplus(gate) * up,
        lambda gate, up: torch.log1p(gate.exp()) * up,
    ),
    "sigmoid as tanh": (
        lambda gate, up: torch.sigmoid(gate) * up,
        lambda gate, up: up * (0.5 * torch.tanh(gate / 2) + 0.5),
    ),
    "squares": (
        lambda gate, up: torch.sigmoid(gate) ** 2 * up,
        lambda gate, up: up / (1 + torch.exp(-gate)).square(),
    ),
    "casts": (lambda gate, up: gate.float() * up, lambda gate, up: (gate * up.to(torch.float64))),
    "gelu": (
        lambda gate, up: F.gelu(gate) * up,
        lambda gate, up: 0.5 * gate * (1 + torch.erf(gate / 1.4142135623730951)) * up,
    ),
    "gelu tanh": (lambda gate, up: F.gelu(gate, approximate="tanh") * up, tanh_gelu),
    "relu as clamp": (lambda gate, up: F.relu(gate) * up, lambda gate, up: gate.clamp(min=0) * up),
    "relu as where": (
        lambda gate, up: F.relu(gate) * up,
        lambda gate, up: torch.where(gate > 0, gate, 0) * up,
    ),
    "relu squared": (
        lambda gate, up: F.relu(gate) ** 2 * up,
        lambda gate, up: F.relu(gate) * gate * up,
    ),
    "hardswish": (
        lambda gate, up: F.hardswish(gate) * up,
        lambda gate, up: gate * F.relu6(gate + 3) / 6 * up,
    ),
    "condition on a sum": (
        lambda gate, up: torch.maximum(gate, up) + torch.minimum(gate, up),
        lambda gate, up: gate + up,
    ),
    "roots": (
        lambda gate, up: gate * torch.rsqrt(gate * gate + 1) * up,
        lambda gate, up: gate * torch.sqrt(gate**2 + 1) / (gate**2 + 1) * up,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_equal_functions_are_proven(name):
    left, right = EQUAL[name]
    assert difference(of(left), of(right)) is None


DIFFERENT = {
    "constant": (
        lambda gate, up: torch.sigmoid(gate) * up,
        lambda gate, up: up * (0.5 * torch.tanh(gate / 2) + 0.5000001),
        "they differ",
    ),
    "two gelus": (
        lambda gate, up: F.gelu(gate) * up,
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        "erf(",
    ),
    "a rounded constant": (
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        lambda gate, up: 0.5 * gate * up
        * (1 + torch.tanh(0.79788456 * (gate + 0.044715 * gate**3))),
        "they differ",
    ),
    "far from zero only": (
        lambda gate, up: F.relu6(gate) * up, lambda gate, up: F.relu(gate) * up, "they differ",
    ),
    "one point": (
        lambda gate, up: torch.where(gate > 0, up, 0),
        lambda gate, up: torch.where(gate >= 0, up, 0),
        "where gate = 0 is -up",
    ),
    "undefined": (
        lambda gate, up: torch.log(-gate * gate) * up, lambda gate, up: torch.sqrt(-up * up - 1),
        "neither side is a real number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_functions_are_refused_with_the_difference(name):
    left, right, said = DIFFERENT[name]
    assert said in difference(of(left), of(right))


def test_counterexample_is_one():
    """The point that is shown does tell the two apart."""
    said = difference(G**2, G**2 + sympy.Rational(1, 1000))
    at = float(said.split("gate = ")[1].split(";")[0])
    left, right = said.split("they differ: ")[1].split(" at ")[0].split(" against ")
    assert float(left) == pytest.approx(at**2)
    assert float(right) == pytest.approx(at**2 + 1e-3)


def test_what_is_not_decided_is_refused(monkeypatch):
    """Numbers that agree are no proof."""
    monkeypatch.setattr(equal, "_POINTS", 1)
    monkeypatch.setattr(equal, "_TOLERANCE", sympy.Integer(100))
    assert "could not be proven: the difference is" in difference(sympy.sin(G), sympy.cos(G))


def test_kinks_are_left_out_where_asked():
    left, right = (sympy.Piecewise((1, c), (0, True)) for c in (G > 0, G >= 0))
    assert difference(left, right) is not None
    assert difference(left, right, kinks=False) is None


@pytest.mark.parametrize("name", RULES)
def test_rule_is_proven(name):
    pairs = RULES[name]()
    assert pairs
    for left, right in pairs:
        assert left.free_symbols
        assert difference(left, right) is None


def test_wrong_matrix_identities_are_refused():
    ((left, right),) = RULES["R1"]()
    assert "they differ" in difference(left, right.T)
    ((left, right),) = RULES["R5"]()
    assert "they differ" in difference(left, 2 * right - left + sympy.ones(*left.shape))
    assert "matrix against" in difference(left, sympy.zeros(1, 1))


def test_gradient_of_swiglu_is_its_derivative():
    arguments = {"dy": DY, "gate": G, "up": U, "need_dgate": True, "need_dup": True}
    dgate, dup = expression(swiglu_backward_definition, arguments)
    value = of(swiglu_definition)
    assert difference(dgate, DY * sympy.diff(value, G)) is None
    assert difference(dup, DY * sympy.diff(value, U)) is None
    assert "they differ" in difference(dup, DY * sympy.diff(value, G))


def test_gradient_of_rms_norm_is_its_derivative():
    """dx_i = sum over j of dy_j d y_j / d x_i, three columns standing for all."""
    x, w, dy = (Row(sympy.symbols(f"{n}0:3", real=True)) for n in "xwd")
    forward = {"x": x, "weight": w, "eps": sympy.Rational(1, 100), "out_dtype": torch.float64}
    y, rstd = expression(rms_norm_definition, forward)
    backward = {"dy": dy, "x": x, "weight": w, "rstd": rstd, "need_dx": True, "need_dweight": False}
    dx, _ = expression(rms_norm_backward_definition, backward)
    want = sum(d * sympy.diff(value, x[0]) for d, value in zip(dy, y, strict=True))
    assert difference(dx[0], want) is None
    assert difference(dx[1], want) is not None


#: How to call what takes more than one tensor.
CALLS = {
    **{n: lambda x, n=n: getattr(torch, n)(x, 0.75) for n in ("add", "sub", "mul", "div", "pow")},
    **{n: lambda x, n=n: torch.where(getattr(torch, n)(x, 0.9), 2 * x, x - 1)
       for n in ("lt", "le", "gt", "ge")},
    **{n: lambda x, n=n: getattr(torch, n)(x, 0.5 * x + 0.3) for n in ("maximum", "minimum")},
    "clamp": lambda x: torch.clamp(x, -1.25, 0.75),
    "clamp_min": lambda x: torch.clamp_min(x, 0.75),
    "clamp_max": lambda x: torch.clamp_max(x, 0.75),
    "log_sigmoid": F.logsigmoid,
    "where": lambda x: torch.where(x > 0.5, x * 2, x - 1),
}  # fmt: skip
POSITIVE = ("log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal", "div", "pow")


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - {"cast", "silu_backward"}))
def test_formula_is_what_torch_computes(name):
    """Each row of the table against torch's function of that name, in float64."""
    points = [-3.7, -1.2, -0.4, 0.3, 0.9, 2.6, 5.5]
    points = [abs(x) for x in points] if name in POSITIVE else points
    call = CALLS.get(name) or getattr(torch, name, None) or getattr(F, name)
    want = call(torch.tensor(points, dtype=torch.float64)).tolist()

    def function(x):
        return call(x)

    formula = expression(function, {"x": G})
    have = [float(sympy.N(formula.subs(G, sympy.Rational(str(x))), 20)) for x in points]
    assert have == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_statistics_of_a_row():
    """What the definitions of norms are made of: three columns stand for all."""
    x = Row(sympy.symbols("x0:3", real=True))

    def moments(x):
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return var + mean.square(), mean

    squares, mean = expression(moments, {"x": x})
    assert difference(squares, sum(c**2 for c in x) / 3) is None
    assert difference(mean, sum(x) / 3) is None


def good(gate, up):
    return torch.sigmoid(gate) * up


def good_gradient(dy, gate, up):
    s = torch.sigmoid(gate)
    return dy * up * s * (1 - s), dy * s


def wrong_gradient(dy, gate, up):
    s = torch.sigmoid(gate)
    return dy * up * s, dy * s


def unknown_function(gate, up):
    return torch.special.i0(gate) * up


def unusual_option(gate, up):
    return torch.add(gate, up, alpha=2)


def in_place(gate, up):
    return torch.sigmoid(gate).mul_(up)


def branches(gate, up):
    return gate if gate > 0 else up


def reduces(gate, up):
    return gate.mean(-1, keepdim=True) * up


def unused(gate, up):
    return torch.sigmoid(gate)


def three(gate, up, more):
    return torch.sigmoid(gate) * up


def returns_two(gate, up):
    return gate, up


def test_gradient_that_is_right_is_proven():
    proven = prove(Pattern(name="a", meaning=good, gradient=good_gradient))
    assert proven[1:] == ["gradient with respect to gate", "gradient with respect to up"]


REFUSED = {
    "wrong gradient": (
        {"gradient": wrong_gradient}, "gradient with respect to gate: they differ",
    ),
    "one gradient of two": ({"gradient": lambda dy, gate, up: dy}, "gradient returns 1 values"),
    "parameters of a gradient": ({"gradient": lambda dy, gate: dy}, "gradient takes dy and then"),
    "wrong idiom": (
        {"idioms": (good, lambda gate, up: torch.tanh(gate) * up)}, "they differ",
    ),
    "other parameters": ({"idioms": (three,)}, "idiom three does not use its parameter more"),
    "fewer parameters": (
        {"idioms": (lambda gate: torch.sigmoid(gate) * gate,)},
        "takes gate; the meaning good takes",
    ),
    "unused": ({"idioms": (unused,)}, "idiom unused does not use its parameter up"),
    "two results": ({"idioms": (returns_two,)}, "must return one tensor"),
    "unknown function": ({"meaning": unknown_function}, "uses special_i0(...)"),
    "option": ({"idioms": (unusual_option,)}, "uses add(..., alpha=2), which the matcher cannot"),
    "in place": ({"idioms": (in_place,)}, "uses .mul_(...), which the matcher cannot read"),
    "control flow": ({"meaning": branches}, "branches cannot be traced"),
    "reduction": ({"meaning": reduces}, "is not elementwise"),
    "largest of a row": (
        {"idioms": (lambda gate, up: gate - up.max(-1, keepdim=True).values,)},
        "uses .max(..., keepdim=True), which is not elementwise: it reads more than one element",
    ),
    "norm of a row": (
        {"meaning": lambda gate, up: F.rms_norm(gate, (8,)) * up},
        "uses rms_norm(..., weight=None, eps=None), which is not elementwise",
    ),
    "shape": (
        {"idioms": (lambda gate, up: gate * up.shape[-1],)}, "uses .shape, which is not elementwise"
    ),
    "identity": ({"identities": lambda: [(G, G), (G, G + 1)]}, "identity 2: they differ"),
    "matrix identity": (
        {"identities": lambda: [(sympy.Matrix([[G, U]]), sympy.Matrix([[G, G]]))]},
        "identity 1: they differ",
    ),
    "rule": ({"rules": ("R9",)}, "no rule is called 'R9'; known are R1, R2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_pattern_that_is_not_proven_is_refused(name):
    options, said = REFUSED[name]
    with pytest.raises(PatternError) as caught:
        prove(Pattern(**{"name": "mine", "meaning": good, **options}))
    assert said in str(caught.value)


def test_pattern_of_an_op_is_compared_with_its_definition():
    from coda_inductor.semantic.gates import swiglu

    def pattern(idiom, **options):
        arguments = {"arguments": lambda m: (m.bound["gate"], m.bound["up"]), **options}
        return Pattern(name="mine", op=swiglu, idioms=(idiom,), **arguments)

    example = {"gate": (4, 8), "up": (4, 8)}
    assert prove(pattern(lambda gate, up: up * F.silu(gate), example=example))
    with pytest.raises(PatternError, match="they differ"):
        prove(pattern(lambda gate, up: up * F.gelu(gate), example=example))
    with pytest.raises(PatternError, match="example has no up"):
        prove(pattern(lambda gate, up: up * F.silu(gate), example={"gate": (4, 8)}))
    with pytest.raises(PatternError, match="nothing to prove"):
        prove(pattern(lambda gate, up: up * F.silu(gate)))


def scaled(c):
    return lambda gate: gate * c


MALFORMED = {
    "name": ({"name": "my gate", "meaning": good}, "'my gate' must be an identifier"),
    "neither": ({"name": "a"}, "give either meaning"),
    "idioms": ({"name": "a", "meaning": good, "idioms": good}, "idioms must be a tuple"),
    "arguments": ({"name": "a", "meaning": good, "arguments": good}, "go with op, not meaning"),
    "default": (
        {"name": "a", "meaning": lambda gate, alpha=1.0: gate * alpha}, "without a default",
    ),
    "no tensor": ({"name": "a", "meaning": lambda: 1}, "no parameter is a tensor"),
    "closure": ({"name": "a", "meaning": scaled(2)}, "closes over c"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pattern_says_what_is_wrong(name):
    options, said = MALFORMED[name]
    with pytest.raises(PatternError) as caught:
        Pattern(**options)
    assert said in str(caught.value)
