# SPDX-License-Identifier: Apache-2.0
"""Products of low rank (LoRA) take nothing from those of full rank beside them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check_gradients, randn
from passes import aten_graph, run_pass
from torch.utils.checkpoint import checkpoint

from coda_inductor import pipeline
from coda_inductor.graph.gemms import GEMMS, low_rank
from coda_inductor.semantic.dropout import BACKWARD

(ADAPTERS,) = (each.run for each in pipeline.ON_ATEN if each.name == "adapters")
aten = torch.ops.aten
M, D, WIDE, RANK = 32, 16, 24, 2


def adapted(x, w, a, b, scale=0.7):
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * scale


def of_mlp(x, gate, gate_a, gate_b, up, up_a, up_b, down, down_a, down_b):
    hidden = F.silu(adapted(x, gate, gate_a, gate_b)) * adapted(x, up, up_a, up_b)
    return x + adapted(hidden, down, down_a, down_b)


def of_normed_mlp(x, gamma, first, *weights):
    x = x + F.linear(x.tanh(), first)
    return x + of_mlp(F.rms_norm(x, (D,), gamma, 1e-6), *weights)


ADAPTED = ((WIDE, D), (RANK, D), (WIDE, RANK))
MLP = (*ADAPTED, *ADAPTED, (D, WIDE), (RANK, WIDE), (D, RANK))


def weights(function, shapes):
    """Only adapters, whose rank is a side, are trained."""
    made = Weights(function, *(randn(*s) / s[-1] ** 0.5 for s in shapes))
    for parameter, shape in zip(made.parameters(), shapes, strict=True):
        parameter.requires_grad_(RANK in shape)
    return made


NORMED = ((D,), (D, D), *MLP)


@pytest.mark.parametrize(("function", "shapes", "dynamic"), [
    (of_mlp, MLP, True), (of_normed_mlp, NORMED, False),
    (functools.partial(checkpoint, of_mlp, use_reentrant=False), MLP, False),
])  # fmt: skip
def test_gradients_are_eagers_and_full_ranks_are_one_gemm(function, shapes, dynamic):
    model = weights(function, shapes)
    harness = check_gradients(model, randn(2, M // 2, D).requires_grad_(), dynamic=dynamic)
    (both,) = [s for s in harness.fused if s.shape[1:] == (D, 2 * WIDE)]  # gate and up
    assert both.absorbed.count("add") >= 2
    # The gate's gradient is made where the product of full rank is.
    made = [s for s in harness.fused if s.shape[1] == WIDE and s.role == "input gradient"]
    assert [s.shape[2] for s in made if "sigmoid" in str(s.program)] == [D]


NUMBERS = {
    "one product": (lambda x, m: ((x * 0.5).reshape(-1, D) @ m,), True),
    "transposed": (lambda x, m: ((x * 0.5).t() @ x[:, :RANK],), True),
    "a large product": (lambda x, m: ((y := x * 0.5) @ m, y @ x.t()), False),
    "another reader": (lambda x, m: ((y := x * 0.5) @ m, y.sin()), False),
    "both factors": (lambda x, m: ((y := x[:, :1] * 0.5).t() @ y,), False),
    "a tensor": (lambda x, m: ((x * x[:1]) @ m,), False),
    "another dtype": (lambda x, m: ((x.half() * torch.tensor(0.5).item()).double() @ m,), False),
    "float16, which may overflow": (lambda x, m: ((x.half() * 0.5) @ m.half(),), False),
    "bfloat16": (lambda x, m: ((x.bfloat16() * 0.5) @ m.bfloat16(),), True),
    "no reader that is a product": (lambda x, m: ((x * 0.5).sin() @ m,), False),
}


def rewritten(function, *args, moves, **how):
    """The graph of ``function`` after the pass, which computes the same, and is as it was but where
    something ``moves``; twice does nothing."""
    graph = aten_graph(function, *args, **how)
    before = str(graph)
    run_pass(ADAPTERS, graph)
    assert (str(graph) != before) == moves
    have = torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*args)
    torch.testing.assert_close(have, function(*args), rtol=1e-10, atol=1e-10)
    again = str(graph)
    run_pass(ADAPTERS, graph)
    assert str(graph) == again
    return graph


@pytest.mark.parametrize(("function", "moves"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_waits_until_after_small_products(function, moves):
    graph = rewritten(function, randn(M, D), randn(D, RANK), moves=moves, decomposed=True)
    if moves:
        sizes = [n.meta["val"].numel() for n in graph.nodes if n.target is aten.mul.Tensor]
        assert sizes
        assert max(sizes) * 8 <= M * D


def mm(x, n):
    """A product (M, n) of rank RANK, or n."""
    return x[:, :n] @ x[:n]


def dropped(x):
    """The gradient of a layer of rank RANK behind dropout, (M, M)."""
    seed = x.new_zeros(1, dtype=torch.int64)
    return BACKWARD(x[:, :RANK], x, x[:RANK], seed, 0, 1, 0.5, [True, False])[0]


SUMS = {
    "of low rank between": (lambda x: mm(x, 2) + mm(x, 12) + mm(x, 1) + mm(x, 13), True),
    "one of them twice": (lambda x: (((y := mm(x, 12)) + mm(x, 2)) + y) + mm(x, 13), True),
    "low rank twice": (lambda x: (((y := mm(x, 2)) + mm(x, 12)) + y) + mm(x, 13) + x, True),
    "through views": (lambda x: (mm(x, 2).view(8, 4, -1) + mm(x, 12).view(8, 4, -1))
                      + mm(x, 13).view(8, 4, -1), True),
    "behind dropout": (lambda x: mm(x, 12) + dropped(x) + mm(x, 13), True),
    "in order, behind dropout": (lambda x: mm(x, 12) + mm(x, 13) + dropped(x), False),
    "one, behind dropout": (lambda x: dropped(x) + mm(x, 12) + x, False),
    "one of full rank": (lambda x: x + mm(x, 2) + mm(x, 12), False),
    "a part is read": (lambda x: ((y := mm(x, 2) + mm(x, 12)) + mm(x, 13)) * y.sin(), False),
    "a part is wider": (lambda x: (mm(x, 2) + mm(x, 12))[:1] + mm(x, 13)[:1], False),
    "in another dtype": (lambda x: (mm(x, 2) + mm(x, 12)).float() + mm(x, 13).float(), False),
}  # fmt: skip


@pytest.mark.parametrize(("function", "moves"), SUMS.values(), ids=SUMS)
def test_terms_of_full_rank_come_first(function, moves):
    rewritten(lambda x: (function(x),), randn(M, M), moves=moves)


def test_a_sum_of_more_terms_than_python_recurses_into():
    def function(x):
        total = x @ x
        for _ in range(1500):
            total = total + x
        return (total,)

    run_pass(ADAPTERS, aten_graph(function, randn(M, M)))


def test_a_part_of_another_checkpoint_stays_as_it_is():
    graph = aten_graph(SUMS["of low rank between"][0], randn(M, M))
    before = str(graph)
    first = next(n for n in graph.nodes if n.target is aten.add.Tensor)
    first.meta["ac_graph_id"] = 1
    run_pass(ADAPTERS, graph)
    assert str(graph) == before


def test_what_is_of_low_rank():
    def ranks(m, n, k):
        graph = aten_graph(lambda a, b: (a @ b,), randn(m, k), randn(k, n))
        return [low_rank(node) for node in graph.nodes if node.target in GEMMS]

    assert ranks(64, 64, 8) == ranks(2056, 2056, 256) == [True]
    assert ranks(64, 56, 8) == ranks(56, 64, 8) == ranks(2056, 2056, 257) == [False]
