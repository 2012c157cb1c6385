# SPDX-License-Identifier: Apache-2.0
"""The contexts people train in: what fires, what is saved, gradients."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, leave_custom_ops
from harness import Harness, Stock
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from zoo.layers import VOCABULARY, Block, Decoder, Gated

from coda_inductor.backend import coda

aten = torch.ops.aten
D = 32


def counts(layers: int) -> dict[str, int]:
    """What fires: every norm but the first, whose input is an embedding, and every gate."""
    norms = {"rms_norm": 2 * layers, "rms_norm_backward": 2 * layers}
    return {**norms, "swiglu": layers, "swiglu_backward": layers}


def fired(harness: Any) -> dict[str, int]:
    return {name: harness.counts[name] for name in counts(1)}


def tokens(batch: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(ours: Any, eagers: Any, tolerance: float) -> None:
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


def train(model, ids, **options):
    harness = Harness(**options)
    return harness, step(model, ids, functools.partial(harness.train, model))


def selective(policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def save_gemms(_ctx, op, *_args, **_kwargs):
    save = op in (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


# How a block is checkpointed -> are its GEMMs computed again?
CHECKPOINTS = {
    "none": (lambda block, x: block(x), False),
    "not reentrant": (lambda block, x: checkpoint(block, x, use_reentrant=False), True),
    "reentrant": (lambda block, x: checkpoint(block, x, use_reentrant=True), True),
    "GEMMs saved": (selective(save_gemms), False),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpointed_blocks(name, monkeypatch):
    """Whatever torch recomputes and saves, we recompute and save, no more."""
    leave_custom_ops(monkeypatch)
    each, again = CHECKPOINTS[name]
    layers = 3 if again else 1  # what is recomputed is counted between first and last too
    model, ids = Decoder(layers, each=each), tokens()
    harness, ours = train(model, ids)
    stock = Stock()
    loss_of(stock.train(model, ids), ids).backward()
    assert_close(ours, step(model, ids), 1e-5)
    assert matrices(harness) <= matrices(stock)
    kernels = {n.name for n in harness.parts[0].nodes if "gemm_epilogue" in str(n.target)}
    recomputed = [n for n in harness.parts[1].nodes if n.name in kernels]
    assert kernels or name == "GEMMs saved"
    if name != "GEMMs saved":  # a policy says how much is kept, not which kernels run again
        assert bool(recomputed) == again
    if again:  # all of a block but what makes its output, which is saved but for the last
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
        assert_close(step(model, ids, compiled), step(model, ids), 1e-5)
        graphs.add(harness.graphs)
    assert len(graphs) == 1  # all of them made in the first step
    harness.counts = Counter(counters["coda"])
    assert fired(harness) == counts(1)


def test_dropout_draws_eagers_numbers(without_code):
    model, ids = Decoder(1, dropout=0.3), tokens(4, 8)
    found = []
    with torch._inductor.config.patch(fallback_random=True):
        for call in (torch.compile(model, backend=coda, options={"strict": True}), model):
            model.zero_grad()
            torch.manual_seed(3)
            loss_of(call(ids), ids).backward()
            found.append(gradients(model))
    assert_close(*found, 1e-4)
    # Masks lie between the GEMMs and the residuals, which they keep apart.
    assert counters["coda"]["swiglu_backward"] == 1


def test_double_backward_is_a_clear_error_and_training_and_evaluation_go_on(without_code):
    model, ids = Decoder(1), tokens(4, 8)
    compiled = torch.compile(model, backend=coda, options={"strict": True})
    found = torch.autograd.grad(loss_of(compiled(ids), ids), [model.norm.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        found[0].sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(compiled(ids), ids).backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)
    assert counters["coda"]["rms_norm"] == 2 * 2  # the graph that trains and the other
    assert counters["coda"]["rms_norm_backward"] == 2


def test_rows_of_a_nested_tensor():
    """Its number of rows has a hint that is no number."""
    layer, parts = Gated(D, D), [torch.randn(rows, D) for rows in (3, 5)]
    found, harness = [], Harness()
    for call in (torch.compile(layer, backend=harness), layer):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        call(x).values().sum().backward()
        found.append({"x": x.grad.values()})
    assert_close(*found, 1e-5)
    assert harness.graphs == 1
    assert harness.fused


@pytest.mark.parametrize("late", [False, True], ids=["", "late_gradients"])
def test_a_loss_of_a_nested_tensors_values(late, monkeypatch):
    """Of a head's logits, which are returned beside it: a nested tensor has no such slices."""
    if late:
        monkeypatch.setattr("coda_inductor.dynamo.late_gradients.LEAST_BYTES", 0)
    head, labels = nn.Linear(D, VOCABULARY, bias=False), torch.arange(8)

    def loss_and_logits(x):
        logits = head(x)
        return F.cross_entropy(logits.values(), labels), logits

    parts = [torch.randn(rows, D) for rows in (3, 5)]
    found, harness = [], Harness()
    for call in (torch.compile(loss_and_logits, backend=harness), loss_and_logits):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        loss, logits = call(x)
        (loss + logits.values().square().sum()).backward()
        found.append({"x": x.grad.values(), "loss": loss.detach()})
    assert_close(*found, 1e-5)
    assert harness.graphs == 1


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
    assert_close(*found, 1e-5)
    assert harness.fused
