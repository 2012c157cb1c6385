# SPDX-License-Identifier: Apache-2.0
"""Random graphs of GEMMs, norms, elementwise work and ops that cannot fuse: always eager's values
and gradients.

Ops are strung together blindly: cycles through ops that cannot fuse, values read in many places,
statistics of statistics. Blocks as models have them are what ``fuzz`` writes. Float64 and strict,
so that neither a wrong rewrite nor an exception of ours can hide.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, assert_same, differentiate, leave_custom_ops, randn
from harness import Harness

D = 8
SHAPES = [(2, 3), (1, 5), (3, 1), (1, 1), (9, 8)]
PARAMETERS = {
    "w0": (D, D), "w1": (D, D), "w2": (D, D), "vector": (D,), "gamma": (D,), "number": (),
}  # fmt: skip
#: A deep graph amplifies a difference in the last place; a wrong rewrite is off by 1.
TOLERANCE = 1e-7

# Kind of op -> (how often it is drawn, its spellings). {z} is a recent value, {y} any value.
OPS = {
    "gemm": (28, [
        "F.linear({z}, w0)", "F.linear({z}, w1)", "F.linear({z}, w2, vector)", "{z} @ w0 + number",
    ]),
    "elementwise": (22, [
        "torch.sin({z})", "torch.relu({z})", "{z}.tanh()", "F.silu({z})", "F.gelu({z})", "-{z}",
        "{z} * 0.5 + 1", "{z}.clamp(-1, 1)", "torch.where({z} > 0, {z}, -0.1 * {z})",
        "{z} * ({z} > 0)", "{z}.flatten(0, 1).sin().view({z}.shape)",
    ]),
    "two values": (18, [
        "{z} + {y}", "{z} * {y}", "{z} - {y}", "torch.maximum({z}, {y})", "F.silu({z}) * {y}",
    ]),
    "broadcast": (8, ["{z} * vector", "{z} * x[..., :1]", "{z} * number", "vector - {z}"]),
    "norm": (7, [
        "F.rms_norm({z}, (8,), vector, 1e-3)", "F.rms_norm({z}, (8,), None, 1e-3)",
        "F.layer_norm({z}, (8,), vector, gamma, 1e-3)", "F.layer_norm({z}, (8,))",
    ]),
    "not fusable": (12, [
        "{z}.cumsum(0)", "{z}.softmax(-1)", "{z}.flip(-1)", "{z} - {z}.mean(-1, keepdim=True)",
        "{z} * {z}.sum(-1, keepdim=True).tanh()",
        "{z}.transpose(0, 1).contiguous().transpose(0, 1)",
    ]),
}  # fmt: skip
OUTPUTS = [
    "{z}", "{z}", "{z}.sum(-1)", "{z}.amax(-1)", "{z}.mean(-1, keepdim=True)", "{z} > 0",
    "{z}.flatten(0, 1)",
]  # fmt: skip


def soup(rng: random.Random) -> str:
    """Text of ``function(x, <the parameters>)``, x (B, T, D), that returns a list of tensors."""
    lines, names = [f"def function({', '.join(['x', *PARAMETERS])}):"], ["x"]
    for i in range(rng.randint(4, 14)):
        (_, spellings), *_ = rng.choices([*OPS.values()], [share for share, _ in OPS.values()])
        text = rng.choice(spellings).format(z=rng.choice(names[-4:]), y=rng.choice(names))
        lines.append(f"    v{i} = {text}")
        names.append(f"v{i}")
    outputs = [rng.choice(OUTPUTS).format(z=rng.choice(names)) for _ in range(rng.randint(0, 3))]
    return "\n".join([*lines, f"    return [{', '.join([names[-1], *outputs])}]"])


def model(source: str) -> Weights:
    """The function as a module with parameters drawn anew."""
    namespace = {"torch": torch, "F": F}
    exec(source, namespace)  # noqa: S102  our own text
    scales = [0.4 if len(shape) == 2 else 1.0 for shape in PARAMETERS.values()]
    shaped = zip(scales, PARAMETERS.values(), strict=True)
    return Weights(namespace["function"], *(scale * randn(*shape) for scale, shape in shaped))


@pytest.mark.parametrize("custom", [False, True], ids=["expanded", "custom op"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", range(6))
def test_random_graph(seed, dynamic, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    rng = random.Random(4 * seed + 2 * dynamic + custom)  # noqa: S311  no secret
    source = soup(rng)
    print(source)  # noqa: T201  shown when the test fails
    function, x = model(source), randn(*rng.choice(SHAPES), D)
    have = Harness().run(function, x, dynamic=dynamic)
    with torch.no_grad():
        assert_close(have, function(x))
    for leaf in (leaves := [*function.weights, x]):
        leaf.requires_grad_(rng.random() < 0.75)
    if not any(leaf.requires_grad for leaf in leaves):
        x.requires_grad_()
    ours, eager = copy.deepcopy((function, x)), (function, x)
    have, want = Harness().train(*ours, dynamic=dynamic), function(x)
    assert_close(have, want)
    if any(value.requires_grad for value in want):
        gradients = differentiate(have, ours), differentiate(want, eager)
        assert [g is None for g in gradients[0]] == [g is None for g in gradients[1]]
        assert_close(*gradients)


def assert_close(ours, eager):
    """Beside 1, since what cancels to rounding noise has no relative error."""
    ours, eager = ([1.0 + v.detach() for v in values if v is not None] for values in (ours, eager))
    assert_same(ours, eager, TOLERANCE)
