# SPDX-License-Identifier: Apache-2.0
"""What leaves a fused graph is as independent as what left the original one: a caller may write to
one result without changing another."""

import pytest
import torch
import torch.nn.functional as F
from checking import randn
from harness import Harness, Stock

from coda_inductor.dynamo import late_gradients

W = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()


def several(x):
    y = torch.relu(x @ W)
    return y, y.clone(), y.float().bfloat16(), y.float(), torch.pow(y, 1), y.view(2, 2, 8)


def test_copies_are_copies_and_views_are_views():
    x = torch.randn(4, 16).bfloat16()
    ours, eager = Harness().run(several, x), several(x)
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs)
    for outputs in (ours, eager):
        first, *copies, view = outputs
        first.zero_()
        assert all(copy.abs().sum() > 0 for copy in copies)
        assert view.abs().sum() == 0


def halves(x, w):
    g, u = (x @ w.t()).chunk(2, -1)
    return F.silu(g) * u, u, g + 0, u.t().contiguous()


def turned_and_reduced(x, w):
    z = x @ w.t()
    y = z.relu()
    return y.t(), y.sum(-1, keepdim=True), z.sum(0), y[None]


FUNCTIONS = [halves, turned_and_reduced]


def layout(results):
    """Shapes, strides, offsets, and which of the results share memory."""
    storages = [t.untyped_storage()._cdata for t in results]
    seen = [(t.shape, t.stride(), t.storage_offset()) for t in results]
    return seen, [storages.index(s) for s in storages]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("m", "n"), [(6, 8), (1, 8), (0, 4)])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_layouts_are_those_of_torch_compile(function, m, n, training):
    x, w = randn(m, 16), randn(n, 16).requires_grad_(training)
    have, want = (backend.train(function, x, w) for backend in (Harness(), Stock()))
    assert layout(have) == layout(want)


def test_the_backward_pass_leaves_returned_logits_alone(monkeypatch):
    """Torch gives a saved tensor's memory away if no output seems to share it."""
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 0)

    def function(x, w, labels):
        logits = F.linear(x, w)
        return F.cross_entropy(logits.view(-1, 96), labels), logits

    options = {"gate": "always", "disable": ["cross_entropy"]}
    x, w = (randn(*shape, dtype=torch.float32).requires_grad_() for shape in ((2, 6, 16), (96, 16)))
    loss, logits = torch.compile(function, backend="coda", options=options)(x, w, torch.arange(12))
    kept = logits.detach().clone()
    loss.backward()
    assert torch.equal(logits, kept)


def gated(x, w):
    a, b = F.rms_norm(x @ w.t(), (8,)), x @ w.t().sin()
    y = F.silu(a) * b
    return y.view(-1), a.unflatten(-1, (2, 4)), y.exp().sum()


def looked_at(x, w):
    y = (x @ w.t()).relu()
    return y.view(-1), y.detach(), y[:2].exp(), y.softmax(-1)


@pytest.mark.parametrize("gate", ["always", "never"])
@pytest.mark.parametrize("function", [gated, looked_at], ids=lambda f: f.__name__)
def test_recorded_values_share_memory_where_tensors_do(function, gate):
    harness = Harness(gate=gate)
    harness.train(function, randn(6, 16).requires_grad_(), randn(8, 16).requires_grad_())
    forward, _ = harness.parts
    seen = []

    class Interpreter(torch.fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            if isinstance(result, torch.Tensor):
                seen.append((node.meta["val"], result))
            return result

    inputs = [randn(*n.meta["val"].shape) for n in forward.find_nodes(op="placeholder")]
    Interpreter(torch.fx.GraphModule({}, forward)).run(*inputs)
    recorded, real = (
        [t.untyped_storage()._cdata for t in each] for each in zip(*seen, strict=True)
    )
    assert [recorded.index(s) for s in recorded] == [real.index(s) for s in real]
