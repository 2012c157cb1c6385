"""Random graphs of GEMMs, norms, elementwise work and ops that cannot fuse: always eager's values.

What no one thought of writing down: cycles through unfusable ops, values read in many places,
statistics of statistics, one row, one column of rows. Float64 and strict, so that neither a wrong
rewrite nor an exception of ours can hide.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, assert_same, leave_custom_ops, randn
from harness import Harness

D = 8
SHAPES = [(2, 3), (1, 5), (3, 1), (1, 1), (9, 8)]

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
    "norm": (7, ["F.rms_norm({z}, (8,), vector, 1e-3)", "F.rms_norm({z}, (8,), None, 1e-3)"]),
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


def random_source(rng: random.Random) -> str:
    """Python text of a function of x (B, T, D), three square weights, a vector and a number."""
    lines, names = ["def function(x, w0, w1, w2, vector, number):"], ["x"]
    for i in range(rng.randint(4, 14)):
        (_, spellings), *_ = rng.choices([*OPS.values()], [share for share, _ in OPS.values()])
        text = rng.choice(spellings).format(z=rng.choice(names[-4:]), y=rng.choice(names))
        lines.append(f"    v{i} = {text}")
        names.append(f"v{i}")
    outputs = [rng.choice(OUTPUTS).format(z=rng.choice(names)) for _ in range(rng.randint(0, 3))]
    return "\n".join([*lines, f"    return [{', '.join([names[-1], *outputs])}]"])


@pytest.mark.parametrize("custom", [False, True], ids=["expanded", "custom op"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", range(20))
def test_random_graph(seed, dynamic, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    rng = random.Random(4 * seed + 2 * dynamic + custom)  # noqa: S311  no secret
    source, namespace = random_source(rng), {"torch": torch, "F": F}
    print(source)  # noqa: T201  shown when the test fails
    exec(source, namespace)  # noqa: S102  our own text
    weights = [0.4 * randn(D, D) for _ in range(3)]
    model = Weights(namespace["function"], *weights, randn(D), randn())
    x = randn(*rng.choice(SHAPES), D)
    ours = Harness().run(model, x, dynamic=dynamic)
    with torch.no_grad():
        eager = model(x)
    # Beside 1, since what cancels to rounding noise has no relative error. A deep graph amplifies a
    # difference in the last place; a wrong rewrite is off by 1.
    assert_same([1.0 + value for value in ours], [1.0 + value for value in eager], tolerance=1e-7)
