# SPDX-License-Identifier: Apache-2.0
"""A product of concatenated columns is a sum of products."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, randn
from passes import codes
from zoo.diffusion import WIDTH, Blocks, Single
from zoo.idioms import joined

from coda_inductor import pipeline

(NOOPS,) = (each.run for each in pipeline.ON_ATEN if each.name == "noops")
aten = torch.ops.aten
D, WIDE = WIDTH, 4 * WIDTH


def test_single_blocks_concatenate_streams_and_no_columns():
    layers = 2
    model = Blocks(Single, layers).double()
    harness = check(model, randn(1, 10, D), randn(1, 6, D), randn(1, D), dynamic=True)
    assert harness.counts["concatenated"] == layers
    joined = [n for n in harness.graph.nodes if n.target is aten.cat.default]
    assert [n.args[1] for n in joined if n.args[1] != 0] == layers * [1]  # text and image
    # The wider product adds the other one, the gate and the residual.
    sums = [site for site in harness.fused if site.shape[1:] == (D, WIDE)]
    assert [site.patterns[-1] for site in sums] == layers * ["residual"]


SHAPES = (WIDE, D), (D, D + WIDE)


@pytest.mark.parametrize("function", [
    lambda x, up, down: joined(x, up, down, x[0, 0]),
    lambda x, up, down: joined(x, up, down[:, torch.arange(D + WIDE)]).relu(),
    lambda x, up, down: F.linear(  # three parts, the widest in the middle
        torch.cat([x, F.gelu(F.linear(x, up)), F.linear(x, up).tanh()], -1),
        torch.cat([down, down[:, :WIDE]], 1),
    ),
    lambda x, up, down: torch.cat([x[0], F.gelu(x[0] @ up.T)], -1) @ down.T,
    lambda x, up, down: F.linear(  # a gated part
        torch.cat([x, F.silu(F.linear(x, up)) * F.linear(x, up.flip(0))], -1), down
    ),
])  # fmt: skip
def test_it_is_the_same_number(function):
    harness = check(function, randn(2, 6, D), *(randn(*shape) for shape in SHAPES))
    assert harness.counts["concatenated"] == 1


def broken(function):
    return lambda x, up, down: function(x, F.gelu(F.linear(x, up)), down)


REFUSED = {
    "read elsewhere": broken(lambda x, h, w: (F.linear(c := torch.cat([x, h], -1), w), c.sin())),
    "no epilogue": lambda x, up, down: F.linear(torch.cat([x, F.linear(x, up).atan()], -1), down),
    "of inputs": lambda x, up, w: F.linear(torch.cat([x, x.repeat(1, 1, 4).sin()], -1), w),
    "of rows": broken(lambda x, h, w: torch.cat([x, h[..., :D]], 1) @ w[:, :D]),
    "of two dtypes": broken(lambda x, h, w: torch.cat([x.float(), h], -1) @ w.T),
    "aligned": broken(lambda x, h, w: F.linear(torch.cat([x[..., :-1], h, x[..., -1:]], -1), w)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_saves_nothing(name):
    harness = check(REFUSED[name], randn(2, 6, D), *(randn(*shape) for shape in SHAPES))
    assert harness.counts["concatenated"] == 0
    said = any(name in refusal.text for refusal in harness.report.refusals)
    assert said != name.startswith("of "), codes(harness)
