# SPDX-License-Identifier: Apache-2.0
"""A product of concatenated columns is a sum of products, and slices of all of a tensor are it."""

import pytest
import torch
import torch.nn.functional as F
from checking import check, randn
from passes import aten_graph, codes, run_pass
from zoo.diffusion import WIDTH, Blocks, Single
from zoo.idioms import joined

from coda_inductor import pipeline

(NOOPS,) = (each.run for each in pipeline.ON_ATEN if each.name == "noops")
aten = torch.ops.aten
D, WIDE, STEP = WIDTH, 4 * WIDTH, 8


def test_single_blocks_concatenate_streams_once_and_no_columns():
    layers = 2
    model = Blocks(Single, layers).double()
    harness = check(model, randn(1, 10, D), randn(1, 6, D), randn(1, D), dynamic=True)
    assert harness.counts["concatenated"] == layers
    joined = [n for n in harness.graph.nodes if n.target is aten.cat.default]
    assert [n.args[1] for n in joined if n.args[1] != 0] == [1]  # text and image, for all blocks
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


SLICES = {
    "all, in order": (lambda x: torch.cat([x[:, :4], x[:, 4:7], x[:, 7:]], 1), True),
    "another order": (lambda x: torch.cat([x[:, 4:], x[:, :4]], 1), False),
    "with a gap": (lambda x: torch.cat([x[:, :3], x[:, 4:]], 1), False),
    "of two tensors": (lambda x: torch.cat([x[:, :3], x.cos()[:, 3:]], 1), False),
    "along another dimension": (lambda x: torch.cat([x[:, :5], x[:, 5:]], 2), False),
    "of another layout": (lambda x: torch.cat([x.mT[:, :2], x.mT[:, 2:]], 1).view(-1), False),
}


@pytest.mark.parametrize(("function", "goes"), SLICES.values(), ids=SLICES)
@pytest.mark.parametrize("shown", [False, True])
def test_all_slices_of_a_tensor_are_that_tensor(function, goes, shown):
    def all_of_it(x):
        found = function(x.sin())
        return found if shown else found.cos()

    x = randn(2, 10, 4)
    graph = aten_graph(all_of_it, x)
    run_pass(NOOPS, graph)
    left = graph.find_nodes(op="call_function", target=aten.cat.default)
    assert len(left) == (not goes or shown)  # an output is its own tensor
    module = torch.fx.GraphModule({}, graph)
    assert torch.equal(torch.fx.Interpreter(module).run(x), all_of_it(x))
