# SPDX-License-Identifier: Apache-2.0
"""The gradient of an embedding table touches only the rows that were looked up."""

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check_gradients, randn
from harness import Harness
from zoo.heads import Tied

V, D = 64, 8
#: Token 7 stands four times.
TOKENS = torch.tensor([[7, 1, 7, 5], [0, 7, V - 1, 7]])
aten = torch.ops.aten


def kept(harness) -> int:
    """Gradients still scattered into a whole table (torch 2.11 knows no masked scatter)."""
    nodes = list(harness.graph.nodes)
    lookups = [n for n in nodes if n.target is aten.embedding.default]
    (rows,) = {str(n.args[0].meta["val"].shape[0]) for n in lookups}  # a SymInt has no hash
    adds = [n for n in nodes if n.target is aten.index_put.default and n.args[3:] == (True,)]
    adds += [n for n in nodes if n.target is aten._unsafe_masked_index_put_accumulate.default]
    return sum(str(n.meta["val"].shape[0]) == rows for n in adds)


def shared(tokens, table, head):
    """The product is the gradient of a second weight too, so that it must not change."""
    return F.linear(F.embedding(tokens, table), head + table)


HALF, LONG = torch.bfloat16, TOKENS.repeat(1, 5)
#: (model, tokens, options, how many lookups' gradients touch their rows alone).
CASES = {
    "float64, padding": (lambda: Tied(padding=7), TOKENS, {}, 1),
    "bfloat16": (lambda: Tied(HALF), TOKENS, {}, 1),
    "two lookups": (lambda: Tied(lookups=2), TOKENS, {}, 2),
    "a small table": (Tied, LONG, {}, 0),
    # Nothing would be saved but one pass: the zeros are the result's own.
    "of its own in float32": (lambda: Tied(torch.float32, tied=False), TOKENS, {}, 0),
    "read by others": (lambda: Weights(shared, *randn(2, V, D)), TOKENS, {}, 0),
    "nothing is fused": (Tied, TOKENS, {"gate": "never"}, 0),
}


@pytest.mark.parametrize(("make", "tokens", "how", "fired"), CASES.values(), ids=CASES)
def test_gradients_of_tables(make, tokens, how, fired):
    harness = check_gradients(make(), tokens, **how)
    assert harness.counts["embedding_backward"] == fired
    assert kept(harness) == (not fired)


def test_the_sum_of_a_token_that_stands_often_is_rounded_once():
    """In bfloat16, adding 1 to 256 again and again stays at 256."""
    model, tokens = Tied(torch.bfloat16, rows=800, tied=False), torch.full((1, 360), 3)
    with torch.no_grad():
        model.inner.copy_(torch.eye(D))
    harness = Harness(gate="always")
    (have,) = torch.autograd.grad(harness.train(model, tokens).sum(), [model.weight])
    assert torch.equal(have[3], torch.full((D,), 360.0).bfloat16())
    assert harness.counts["embedding_backward"] == 1


def test_a_table_of_symbolic_size():
    """An argument's sizes, other than a parameter's, are symbolic."""
    table, inner = randn(V, D).requires_grad_(), randn(D, D).requires_grad_()
    tied = lambda table, inner, ids: F.linear(F.embedding(ids, table) @ inner, table)  # noqa: E731
    harness = check_gradients(tied, table, inner, TOKENS, dynamic=True)
    symbolic = [n for n in harness.graph.nodes if n.op == "placeholder" and "val" in n.meta]
    assert any(isinstance(n.meta["val"], torch.SymInt) for n in symbolic)
    assert harness.counts["embedding_backward"] == 1
    assert not kept(harness)
