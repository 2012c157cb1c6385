# SPDX-License-Identifier: Apache-2.0
"""The prover: what is equal is proven, what is not is refuted, and the difference is shown. What a
load compares on numbers refuses the same patterns, but for a function without a formula."""

import contextlib

import pytest
import sympy
import torch
import torch.nn.functional as F
from checking import swiglu

from coda_inductor import Pattern, PatternError
from coda_inductor.patterns import equal
from coda_inductor.patterns.compare import compare
from coda_inductor.patterns.equal import difference
from coda_inductor.patterns.exact import expression
from coda_inductor.patterns.formulas import FORMULAS
from coda_inductor.patterns.prove import prove
from coda_inductor.semantic import cross_entropy, rms_norm
from coda_inductor.semantic.rotary import rotate_pairs

G, U = sympy.symbols("gate up", real=True)


def of(function, **more):
    return expression(function, {"gate": G, "up": U, **more})


def exponentials_of_mish(gate, up):
    w = torch.exp(gate)
    n = w * (w + 2)
    return gate * n / (n + 2) * up


EQUAL = {
    "mish in exponentials": (lambda gate, up: F.mish(gate) * up, exponentials_of_mish),
    "casts": (lambda gate, up: gate.float() * up, lambda gate, up: (gate * up.to(torch.float64))),
    "relu as where": (
        lambda gate, up: F.relu(gate) * up, lambda gate, up: torch.where(gate > 0, gate, 0) * up,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("left", "right"), EQUAL.values(), ids=EQUAL)
def test_equal_functions_are_proven(left, right):
    assert difference(of(left), of(right)) is None


DIFFERENT = {
    "two gelus": (
        lambda gate, up: F.gelu(gate) * up,
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        "erf(",
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


@pytest.mark.parametrize(("left", "right", "said"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_functions_are_refused_with_the_difference(left, right, said):
    assert said in difference(of(left), of(right))


def test_what_is_not_decided_is_refused(monkeypatch):
    """Numbers that agree are no proof."""
    monkeypatch.setattr(equal, "_POINTS", 1)
    monkeypatch.setattr(equal, "_TOLERANCE", sympy.Integer(100))
    assert "could not be proven: the difference is" in difference(sympy.sin(G), sympy.cos(G))


#: How to call what takes more than one tensor.
CALLS = {
    **{n: lambda x, n=n: getattr(torch, n)(x, 0.75) for n in ("add", "sub", "mul", "div", "pow")},
    **{n: lambda x, n=n: torch.where(getattr(torch, n)(x, 0.9), 2 * x, x - 1)
       for n in ("lt", "le", "gt", "ge")},
    **{n: lambda x, n=n: getattr(torch, n)(x, 0.5 * x + 0.3) for n in ("maximum", "minimum")},
    "clamp": lambda x: torch.clamp(x, -1.25, 0.75),
    "clamp_min": lambda x: torch.clamp_min(x, 0.75),
    "clamp_max": lambda x: torch.clamp_max(x, 0.75),
    "hardtanh": lambda x: F.hardtanh(x, -1, 1),  # which torch leaves out, for they are its own
    "log_sigmoid": F.logsigmoid,
    "where": lambda x: torch.where(x > 0.5, x * 2, x - 1),
}  # fmt: skip
POSITIVE = ("log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal", "div", "pow")


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - {"silu_backward"}))
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


def good(gate, up):
    return torch.sigmoid(gate) * up


def good_gradient(dy, gate, up):
    s = torch.sigmoid(gate)
    return dy * up * s * (1 - s), dy * s


def wrong_gradient(dy, gate, up):
    s = torch.sigmoid(gate)
    return dy * up * s, dy * s


def branches(gate, up):
    return gate if gate > 0 else up


def unused(gate, up):
    return torch.sigmoid(gate)


REFUSED = {
    "wrong gradient": ({"gradient": wrong_gradient}, "respect to gate: the results differ"),
    "one gradient of two": ({"gradient": lambda dy, gate, up: dy}, "gradient returns 1 values"),
    "parameters of a gradient": ({"gradient": lambda dy, gate: dy}, "gradient takes dy and then"),
    "wrong idiom": ({"idioms": (good, lambda gate, up: torch.tanh(gate) * up)}, "results differ"),
    "unused": ({"idioms": (unused,)}, "idiom unused does not use its parameter up"),
    "two results": ({"idioms": (lambda gate, up: (gate, up),)}, "must return one tensor"),
    "option": (
        {"idioms": (lambda gate, up: torch.add(gate, up, alpha=2),)},
        "uses add(..., alpha=2), which the matcher cannot",
    ),
    "in place": (
        {"idioms": (lambda gate, up: torch.sigmoid(gate).mul_(up),)},
        "uses mul_(...), which the matcher cannot read",
    ),
    "control flow": ({"meaning": branches}, "branches cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("by", [prove, compare])
@pytest.mark.parametrize("name", REFUSED)
def test_pattern_that_is_wrong_is_refused(name, by):
    options, said = REFUSED[name]
    with pytest.raises(PatternError) as caught:
        by(Pattern(**{"name": "mine", "meaning": good, **options}))
    assert said in str(caught.value)


@pytest.mark.parametrize(("left", "right", "said"), [
    (*DIFFERENT["one point"][:2], "results differ"),
    (lambda x: torch.log(-x * x), lambda x: torch.sqrt(-x * x - 1), "neither side is a real"),
    (lambda x: torch.log(x) + 0, lambda x: 2 * torch.log(torch.sqrt(x)), None),
])  # fmt: skip
def test_numbers_are_compared_at_zero_and_where_both_sides_are_finite(left, right, said):
    refused = pytest.raises(PatternError, match=said) if said else contextlib.nullcontext()
    with refused:
        compare(Pattern(name="mine", meaning=left, idioms=(right,)))


def test_a_function_without_a_formula_is_compared_on_numbers_alone():
    pattern = Pattern(name="mine", meaning=lambda gate, up: torch.special.i0(gate) * up)
    compare(pattern)
    with pytest.raises(PatternError, match=r"no formula for aten\.i0"):
        prove(pattern)


def test_gradient_that_is_right_is_proven():
    pattern = Pattern(name="a", meaning=good, gradient=good_gradient)
    compare(pattern)
    assert len(prove(pattern)) == 3


def of_op(op, idiom, arguments, example=None, **options):
    example = {} if example is None else example
    return Pattern(
        name="mine", op=op, idioms=(idiom,), arguments=arguments, example=example, **options
    )


@pytest.mark.parametrize("by", [prove, compare])
def test_what_is_proven_of_an_op_needs_examples(by):
    for example, said in (({"gate": (4, 8)}, "example has no up"), (None, "nothing to prove")):
        with pytest.raises(PatternError, match=said):
            by(of_op(swiglu, good, lambda m: (m.bound["gate"], m.bound["up"]), example))


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-3)


def centered(x):
    return x * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-3)


def loss(**how):
    return lambda logits, target: F.cross_entropy(logits, target, **how)


def rotation(twice):
    def idiom(x, turns):
        z = torch.view_as_complex(x.reshape(2, -1, 2)) * turns
        return torch.view_as_real(z * turns if twice else z).flatten(1)

    return idiom


CLASSES = {"logits": (3, 2), "target": torch.tensor((1, 0, 1))}
#: Op -> its arguments in a match, an example, an idiom that is it and others that are not.
OF_OPS = {
    swiglu: (
        lambda m: (m.bound["gate"], m.bound["up"]), {"gate": (2, 2), "up": (2, 2)},
        lambda gate, up: up * F.silu(gate), [lambda gate, up: up * F.gelu(gate)],
    ),
    rms_norm: (
        lambda m: (m.bound["x"], None, 1e-3, torch.float64), {"x": (2, 3)},
        rms, [centered],
    ),
    cross_entropy: (
        lambda m: (m.bound["logits"], m.bound["target"], -100, 0.0, "mean", torch.float64), CLASSES,
        loss(), [loss(ignore_index=0), loss(label_smoothing=0.75)],
    ),
    rotate_pairs: (
        lambda m: (m.bound["x"], m.bound["turns"], torch.float64),
        {"x": (2, 4), "turns": torch.ones(2, 2, dtype=torch.complex128)},
        rotation(twice=False), [rotation(twice=True)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", OF_OPS, ids=lambda op: op.__name__)
def test_idioms_of_an_op_are_compared_with_its_definition(op):
    """Element by element, by class, or as pairs."""
    arguments, example, right, others = OF_OPS[op]
    how = {"example": example, "result": 0 if op in (rms_norm, cross_entropy) else None}
    for by in (prove, compare):
        by(of_op(op, right, arguments, **how))
        for other in others:
            with pytest.raises(PatternError, match="results differ"):
                by(of_op(op, other, arguments, **how))


@pytest.mark.parametrize(("options", "said"), [
    ({"name": "my gate", "meaning": good}, "must be an identifier"),
    ({"name": "a"}, "set either meaning"),
    ({"name": "a", "meaning": good, "idioms": good}, "idioms must be a tuple"),
    ({"name": "a", "meaning": lambda gate, alpha=1.0: gate * alpha}, "without a default"),
    ({"name": "a", "meaning": lambda dy: dy * 2}, "its gradient also has a parameter dy"),
    ({"name": "a", "meaning": loss(ignore_index=0)}, "closes over how"),
])  # fmt: skip
def test_malformed_pattern_says_what_is_wrong(options, said):
    with pytest.raises(PatternError, match=said):
        Pattern(**options)
