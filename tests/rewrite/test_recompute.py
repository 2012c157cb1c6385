# SPDX-License-Identifier: Apache-2.0
"""What the backward pass computes anew, what it must not, and what is saved because of it."""

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check_gradients, leave_custom_ops, randn
from harness import Harness
from passes import run_pass
from torch.fx.experimental.proxy_tensor import make_fx
from zoo.layers import HIDDEN

from coda_inductor.rewrite.recompute import recompute_in_backward

D, EPS = 16, 1e-2


def saved_widths(harness) -> list[int]:
    """Row widths of the matrices that the forward pass computes and keeps for the backward."""
    tensors = [n.meta["val"] for n in harness.saved if n.op != "placeholder"]
    return sorted(t.shape[-1] for t in tensors if t.dim() > 1 and t.shape[-1] > 1)


def mlp(activation):
    """Of a bias: h is what the first GEMM stores, the activation is not stored for training."""

    def function(x, up, bias, down):
        return F.linear(activation(F.linear(x, up, bias)), down)

    return Weights(function, randn(HIDDEN, D), randn(HIDDEN), randn(D, HIDDEN))


ACTIVATIONS = {
    "GELU": F.gelu,
    "scaled": lambda z: (z * 0.5).tanh() * z,
    "sigmoid": torch.sigmoid,  # whose derivative reads nothing else: it is what is saved
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_computed_again_and_not_saved(name, monkeypatch):
    leave_custom_ops(monkeypatch)
    harness = check_gradients(mlp(ACTIVATIONS[name]), randn(2, 5, D).requires_grad_())
    assert saved_widths(harness).count(HIDDEN) == 1
    if name == "sigmoid":
        return
    # Its gradient, bias gradient and the copy that the weight's gradient reads leave one epilogue.
    (site,) = [s for s in harness.fused if s.shape[1] == HIDDEN and len(s.program.stores) == 2
               and any(r.axis == "col" for r in s.program.reduces)]  # fmt: skip
    assert [o.kind for o in site.program.operands] == ["tile"]


# A maximum's gradient is found by x == amax(x): a copy of x that is rounded otherwise is not equal
# anywhere, and the gradient is 0 / 0.
def gate_maximum(x, w):
    z = F.linear(x, w)
    a = F.silu(z) * z
    return a * 0.5, a.amax(-1), (a - x).amax(-1)


def of_three_tensors(x, w):
    """Loading three tiles costs more than loading the result, which is saved."""
    a = F.linear(x, w) * F.linear(x, w.t()) * F.linear(x, w + w.t())
    return F.linear(a, w)


FUNCTIONS = {
    **{f.__name__: f for f in (gate_maximum, of_three_tensors)},
    "norm_maximum": lambda x, w: (
        (n := F.rms_norm(F.linear(x, w), (D,), None, EPS)).amax(-1), n.amin(0)
    ),
    "largest_of_two": lambda x, w: (
        torch.maximum((z := F.linear(x, w)).tanh(), torch.minimum(F.silu(z), x)), F.silu(z).max()
    ),
    "view_of_an_activation": lambda x, w: (
        (a := F.gelu(F.linear(x, w))).view(2, -1).amax(-1), a.sum(0)
    ),
    "returned": lambda x, w: (F.linear(a := F.gelu(F.linear(x, w)), w.t()), a),
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_of_what_is_recomputed_or_kept(function, monkeypatch):
    leave_custom_ops(monkeypatch)
    harness = check_gradients(Weights(function, randn(D, D)), randn(2, 9, D).requires_grad_())
    if function is of_three_tensors:
        assert saved_widths(harness) == [D] * 6  # with the result
    if function is gate_maximum:
        x, w = (randn(*s, dtype=torch.bfloat16) for s in ((8, D), (D, D)))
        model = Weights(function, w)
        Harness().train(model, x)[1].sum().backward()
        assert model.weights[0].grad.isfinite().all()


def test_the_gradient_of_a_log_sum_exp_reads_what_was_summed():
    """What was computed again had other roundings, which exp(x - logsumexp(x)) multiplies by x: the
    gradient had twice eager's error."""

    def function(x, w, bias, g):
        return (x + F.linear(x, w, bias) * g).logsumexp(-1)

    weights, x = (randn(D, D) * 4, randn(D), 1 + 0.3 * randn(D)), randn(64, D).bfloat16()
    errors, exact = [], Weights(function, *(w.bfloat16().double() for w in weights))
    exact(x.double()).sum().backward()
    for run in (lambda model, x: model(x), Harness().train):
        model = Weights(function, *(w.bfloat16() for w in weights))
        run(model, x).sum().backward()
        want = exact.weights[0].grad
        errors.append(float((model.weights[0].grad - want).norm() / want.norm()))
    assert errors[1] < 1.2 * errors[0]


def test_a_chain_longer_than_python_recurses():
    """The backward pass reads none of its values, so that all are computed again at once."""

    def function(x, tangents_1):
        product = y = x @ x.t()
        for _ in range(1100):
            y = y * 1.001
        return y.sin(), y.cos() * tangents_1 * product

    graph = make_fx(function, tracing_mode="fake")(randn(4, 4), randn(4, 4)).graph
    before = len(graph.nodes)
    run_pass(recompute_in_backward, graph)
    assert len(graph.nodes) == before + 1100


def test_a_running_statistic_is_of_the_forward_pass(monkeypatch):
    """Nothing but the write at the end of the joint graph reads it."""
    leave_custom_ops(monkeypatch)
    up, down, x = (randn(*s).requires_grad_() for s in ((HIDDEN, D), (D, HIDDEN), (10, D)))
    means = []
    for backend in ("eager", Harness()):
        mean = torch.zeros(HIDDEN, dtype=torch.float64)

        def function(x, mean, up, down):
            a = torch.tanh(F.linear(x, up)) * torch.sigmoid(mean)
            mean.add_(a.detach().square().mean())
            return F.linear(a, down)

        loss = torch.compile(function, backend=backend)(x, mean, up, down).sum()
        means.append(mean.clone())
        torch.autograd.grad(loss, (x, up, down))
        means.append(mean)
    assert torch.equal(means[0], means[1])
    torch.testing.assert_close(means[2:], means[:2])
