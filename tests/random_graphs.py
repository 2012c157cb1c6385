# SPDX-License-Identifier: Apache-2.0
"""Random functions of GEMMs, norms and elementwise work, as Python text.

Two kinds. ``soup`` strings ops together blindly: cycles through ops that cannot fuse, values read
in many places, statistics of statistics. ``blocks`` stacks what Transformers are made of, with the
variations that models have: biases, shared weights, parallel branches, gates, checkpoints.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from checking import Weights, randn
from torch.utils.checkpoint import checkpoint

D, WIDE = 8, 40  # 40 > 4 * 8: the width from which reading z costs more than a pass over dx
SHAPES = [(2, 3), (1, 5), (3, 1), (1, 1), (9, 8)]
PARAMETERS = {
    "w0": (D, D), "w1": (D, D), "w2": (D, D), "u0": (WIDE, D), "u1": (WIDE, D), "d0": (D, WIDE),
    "vector": (D,), "gamma": (D,), "bias": (WIDE,), "number": (),
}  # fmt: skip

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

ACTIVATIONS = [
    "F.silu({z})", "F.gelu({z})", "F.gelu({z}, approximate='tanh')", "torch.relu({z})",
    "torch.relu({z}).square()", "{z}.sigmoid()", "F.silu({z}) * F.silu({z})",
]  # fmt: skip
#: Branches of a block: what they add to the stream, from the normalized n.
BRANCHES = [
    "F.linear(F.linear(n, {w}), {v})",
    "F.linear((F.linear(n, {w}) * F.linear(n, {v})).softmax(-1) * F.linear(n, {u}), {w})",
    "F.linear(F.linear(n, {w}, vector).cumsum(0), {v})",
    "F.linear({narrow}, {v})",
    "F.linear({act}, d0)",
    "F.linear({act} * F.linear(n, u1), d0)",
    "F.linear(F.linear(n, u1, bias) * {act}, d0, vector)",
    "F.linear({narrow} * F.linear(n, {v}), {w}) * number",
    "F.linear({packed}, d0)",
]
AFTERWARDS = ["x", "x", "x", "x", "x * 0.5", "x.sin()", "torch.relu(x)", "x * gamma", "x.cumsum(0)"]


def soup(rng: random.Random) -> str:
    """Text of ``function(x, <the parameters>)``, x (B, T, D), that returns a list of tensors."""
    lines, names = [_head("function")], ["x"]
    for i in range(rng.randint(4, 14)):
        (_, spellings), *_ = rng.choices([*OPS.values()], [share for share, _ in OPS.values()])
        text = rng.choice(spellings).format(z=rng.choice(names[-4:]), y=rng.choice(names))
        lines.append(f"    v{i} = {text}")
        names.append(f"v{i}")
    outputs = [rng.choice(OUTPUTS).format(z=rng.choice(names)) for _ in range(rng.randint(0, 3))]
    return "\n".join([*lines, f"    return [{', '.join([names[-1], *outputs])}]"])


def blocks(rng: random.Random) -> str:
    """As :func:`soup`, of one to three residual blocks; some are checkpointed."""
    count = rng.randint(1, 3)
    lines = [line for i in range(count) for line in [_head(f"block{i}"), *_block(rng)]]
    lines += [_head("function"), "    outputs = []", "    x = F.linear(x, w0)"]
    arguments = ", ".join(["x", *PARAMETERS])
    for i in range(count):
        call = f"block{i}({arguments})"
        if rng.random() < 0.25:
            call = f"checkpoint(block{i}, {arguments}, use_reentrant=False)"
        lines.append(f"    x = {call}")
        if rng.random() < 0.2:
            lines.append(f"    outputs.append({rng.choice(OUTPUTS).format(z='x')})")
    if rng.random() < 0.5:
        lines.append(f"    x = F.linear({_norm(rng)}, u1)")
    return "\n".join([*lines, "    return [x, *outputs]"])


def _block(rng: random.Random) -> list[str]:
    lines = [f"    n = {_norm(rng)}"]
    chosen = [_branch(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    lines.append(f"    x = {' + '.join(['x', *chosen] if rng.random() < 0.9 else chosen)}")
    return [*lines, f"    return {rng.choice(AFTERWARDS)}"]


def _branch(rng: random.Random) -> str:
    act = rng.choice(ACTIVATIONS)
    packed = "(lambda a, b: F.silu(a) * b)(*F.linear(n, torch.cat([u0, u1])).chunk(2, -1))"
    w, v, u = (rng.choice(["w0", "w1", "w2"]) for _ in range(3))
    return rng.choice(BRANCHES).format(
        w=w, v=v, u=u, act=act.format(z="F.linear(n, u0)"), packed=packed,
        narrow=act.format(z=f"F.linear(n, {w})"),
    )  # fmt: skip


def _norm(rng: random.Random) -> str:
    weight = rng.choice(["gamma", "gamma", "vector", "(1 + gamma)", "None"])
    if rng.random() < 0.4:
        bias = rng.choice(["vector", "None"])
        return f"F.layer_norm(x, ({D},), {weight}, {bias}, 1e-3)"
    by_hand = f"{weight} * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))"
    if weight != "None" and rng.random() < 0.5:
        return by_hand
    return f"F.rms_norm(x, ({D},), {weight}, 1e-3)"


def _head(name: str) -> str:
    return f"def {name}({', '.join(['x', *PARAMETERS])}):"


def model(source: str) -> Weights:
    """The function as a module with parameters drawn anew, and which of them are trained."""
    namespace: dict[str, Any] = {"torch": torch, "F": F, "checkpoint": checkpoint}
    exec(source, namespace)  # noqa: S102  our own text
    scale = {2: 0.4, 1: 1.0, 0: 1.0}
    weights = [scale[len(shape)] * randn(*shape) for shape in PARAMETERS.values()]
    return Weights(namespace["function"], *weights)


def freeze_some(function: Weights, x: torch.Tensor, rng: random.Random) -> None:
    """Let a random part of parameters and input want a gradient, at least one of them."""
    leaves = [*function.weights, x]
    for leaf in leaves:
        leaf.requires_grad_(rng.random() < 0.75)
    if not any(leaf.requires_grad for leaf in leaves):
        x.requires_grad_()
