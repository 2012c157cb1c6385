# SPDX-License-Identifier: Apache-2.0
"""The contexts people train in: what fires, what is saved, gradients."""

import functools

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, leave_custom_ops
from harness import Harness, Stock
from passes import codes
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from zoo.layers import VOCABULARY, Block, Decoder, Gated

aten = torch.ops.aten
D = 32


def tokens(batch=2, length=6):
    return torch.randint(0, VOCABULARY, (batch, length))


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(ours, eagers, tolerance=1e-5):
    """Relative to each tensor's norm; both are dicts of tensors."""
    assert ours.keys() == eagers.keys()
    for name, want in eagers.items():
        error = (ours[name].double() - want.double()).norm() / want.double().norm()
        assert error <= tolerance, f"{name}: {error}"


def step(model, ids, call=None):
    """Gradients of one step, from zero; ``call`` stands for the model."""
    model.zero_grad()
    call = model if call is None else call
    loss_of(call(ids), ids).backward()
    return gradients(model)


def save_gemms(_ctx, op, *_args, **_kwargs):
    save = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [None, save_gemms])
def test_checkpointed_blocks(policy, monkeypatch):
    """Whatever torch recomputes and saves, we recompute and save, no more."""
    leave_custom_ops(monkeypatch)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    how = {} if policy is None else {"context_fn": contexts}
    each = functools.partial(checkpoint, use_reentrant=False, **how)
    layers = 3 if policy is None else 1  # what is recomputed is counted between first and last too
    model, ids = Decoder(layers, each=each), tokens()
    harness, stock = Harness(), Stock()
    ours = step(model, ids, functools.partial(harness.train, model))
    step(model, ids, functools.partial(stock.train, model))
    assert_close(ours, step(model, ids))
    assert matrices(harness) <= matrices(stock)
    if policy is None:  # all of a block but what makes its output, which is saved but for the last
        kernels = {n.name for n in harness.parts[0].nodes if "gemm_epilogue" in str(n.target)}
        recomputed = [n for n in harness.parts[1].nodes if n.name in kernels]
        assert kernels
        assert len(recomputed) == len(kernels) - 1 - (layers - 1)


def matrices(harness) -> int:
    """Elements of computed matrices that the forward pass saves; what it returns costs nothing."""
    graph = harness.parts[0]
    returned = graph.output_node().args[0][0]
    kept = [n for n in harness.saved if n.op != "placeholder" and base(n) is not base(returned)]
    return sum(n.meta["val"].numel() for n in kept if n.meta["val"].dim() > 1)


def base(node):
    while any(word in str(node.target) for word in ("view", "reshape")):
        node = node.args[0]
    return node


def test_a_checkpoint_around_compiled_blocks():
    """Layers compiled one by one, with gradient checkpointing: the step that compiles saves what
    the recomputation saves, and a user's hooks see real tensors only."""
    block, x = Block(D).double(), torch.randn(2, 5, D, dtype=torch.float64)
    seen, found = set(), []
    for call in (torch.compile(block, backend=Harness()), block):
        block.zero_grad()
        checkpoint(call, x, use_reentrant=False).sin().sum().backward()
        found.append(list(gradients(block).values()))
    assert_same(*found, 1e-10)

    def pack(tensor):
        seen.add(type(tensor))
        return tensor

    torch._dynamo.reset()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.compile(block, backend=Harness())(x).sum().backward()
    assert seen <= {torch.Tensor, nn.Parameter}
    assert seen


def test_one_dynamic_graph_trains_at_every_length():
    model, harness = Decoder(1, tied=True), Harness()
    compiled = torch.compile(model, backend=harness, dynamic=True)
    graphs = set()
    for shape in ((2, 6), (3, 4), (2, 9)):
        ids = tokens(*shape)
        assert_close(step(model, ids, compiled), step(model, ids))
        graphs.add(harness.graphs)
    assert len(graphs) == 1  # all of them made in the first step
    assert counters["coda"]["rms_norm_backward"] == 2
    assert "symbolic-features" not in codes(harness)  # of weight gradients, whose K is symbolic


@pytest.mark.parametrize("late", [False, True], ids=["", "late_gradients"])
def test_a_nested_tensor(late, monkeypatch):
    """Its number of rows has a hint that is no number; and a loss of its logits, which are returned
    too, has no slices of them."""
    if late:
        monkeypatch.setattr("coda_inductor.dynamo.late_gradients.LEAST_BYTES", 0)
    layer, head, labels = Gated(D, D), nn.Linear(D, VOCABULARY, bias=False), torch.arange(8)

    def loss_and_logits(x):
        logits = head(layer(x))
        return F.cross_entropy(logits.values(), labels), logits

    parts = [torch.randn(rows, D) for rows in (3, 5)]
    found, harness = [], Harness()
    for call in (torch.compile(loss_and_logits, backend=harness), loss_and_logits):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        loss, logits = call(x)
        (loss + logits.values().square().sum()).backward()
        found.append({"x": x.grad.values(), "loss": loss.detach()})
    assert_close(*found)
    assert harness.graphs == 1
    assert harness.fused


def test_rows_that_only_a_value_counts():
    """The sizes of the result's gradient are symbols that nothing in the forward pass computes."""
    layer = Gated(D, D)

    def of_rows(x, count):
        rows = count.item()
        torch._check(rows >= 2)
        torch._check(rows <= 16)
        return layer(x.narrow(0, 0, rows))

    data, found, harness = torch.randn(16, D), [], Harness()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for call in (torch.compile(of_rows, backend=harness), of_rows):
            x = data.clone().requires_grad_()
            call(x, torch.tensor(5)).sum().backward()
            found.append({"x": x.grad})
    assert_close(*found)
    assert harness.fused
