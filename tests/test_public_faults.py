# SPDX-License-Identifier: Apache-2.0
"""Faults that users of other projects reported, as small programs: none may be ours.

A program gets a way to compile, builds its model, and asserts what must hold. It runs eager, under
torch.compile without code generation (decompositions and partitioner), and under coda with the
kernels' numerics. The address of the report is beside it: pt is pytorch/pytorch, hf
huggingface/transformers.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from zoo.float8 import needs_scaled_mm

from coda_inductor.backend import coda

D, H, V = 32, 64, 96
BF16 = torch.bfloat16
Compile = Callable[[Any], Any]
PROGRAMS: dict[str, Callable[[Compile], None]] = {}


def reported(address: str) -> Callable[[Callable[[Compile], None]], Callable[[Compile], None]]:
    """Put a program into the table."""

    def put(program: Callable[[Compile], None]) -> Callable[[Compile], None]:
        PROGRAMS[f"{program.__name__} {address}"] = program
        return program

    return put


class Block(nn.Module):
    """Norm, gate and residual; a checkpoint of all of it; dropout before the sum."""

    def __init__(self, dropout: float = 0.0, saved: bool = False):
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate, self.up, self.down = nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, D)
        self.dropout, self.saved = nn.Dropout(dropout), saved

    def inner(self, x):
        h = self.norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(h)) * self.up(h)))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.saved else self.inner(x)


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


@reported("pt 195214")
def ties_of_a_rounded_quotient_count_in_its_gradient(run):
    scores = (torch.randn(8, D, dtype=BF16) * 4).requires_grad_()

    def loss(scores, w):
        scaled = (scores @ w) / 3.0
        most = scaled.amax(-1, keepdim=True)
        return (scaled == most).sum(-1), (scaled - most).exp().sum()

    counts, total = run(loss)(scores, torch.eye(D, dtype=BF16))
    total.backward()
    assert (counts >= 1).all()
    assert scores.grad.isfinite().all()


@reported("pt 181568")
def a_cast_before_a_wider_bias_rounds(run):
    linear, bias = nn.Linear(D, D, bias=False).to(BF16), torch.randn(D)
    x = torch.randn(16, D, dtype=BF16)
    f = lambda x: F.rms_norm(linear(x).float() + bias, (D,))  # noqa: E731
    exact = F.rms_norm(F.linear(x.double(), linear.weight.double()) + bias, (D,))
    assert relative(run(f)(x), exact) <= 1.2 * relative(f(x), exact)


@reported("pt 190758")
def a_budget_draws_no_second_mask(run):
    """What passed forward is what passes backward."""
    block = nn.Sequential(nn.Linear(D, D, bias=False), nn.Dropout(0.5), nn.Linear(D, D, bias=False))
    for linear in (block[0], block[2]):
        nn.init.eye_(linear.weight)
    x = torch.ones(16, D, requires_grad=True)
    with functorch_config.patch(activation_memory_budget=0.3):
        y = run(block)(x)
        y.sum().backward()
    assert torch.equal(y > 0, x.grad > 0)
    assert 0.2 < (y > 0).float().mean() < 0.8


@reported("hf/peft 3020")
def lora_with_dropout_checkpoints_and_dynamic_sizes_trains(run):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["gate", "up", "down"], lora_dropout=0.05)
    model = peft.get_peft_model(nn.Sequential(Block(saved=True), Block(saved=True)), config)
    compiled = run(model)
    for rows in (8, 12, 16):
        compiled(torch.randn(2, rows, D)).square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and g.isfinite().all() for g in grads)


@reported("unsloth-zoo 1146")
def the_recompile_limit_may_fall_on_a_checkpoint(run):
    model, lengths = nn.Sequential(Block(saved=True), Block(saved=True)), (4, 6, 8, 10, 12)
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        compiled = run(model)
        for rows in lengths:
            compiled(torch.randn(rows, D)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@reported("pt 193633")
def rows_of_no_expert_reach_no_gradient(run):
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("no grouped products")
    w1 = torch.randn(2, D, 2 * H, dtype=BF16, requires_grad=True)
    w2 = torch.randn(2, H, D, dtype=BF16, requires_grad=True)
    x = torch.randn(32, D, dtype=BF16, requires_grad=True)
    ends = torch.tensor([8, 24], dtype=torch.int32)  # rows 24 to 31 belong to none

    def f(x, w1, w2, ends):
        gate, up = torch._grouped_mm(x, w1, offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, w2, offs=ends)[:24]

    compiled = run(f)
    for _ in range(2):
        freed = torch.full((1 << 20,), float("nan"))
        del freed
        compiled(x, w1, w2, ends).float().square().mean().backward()
    assert all(t.grad.isfinite().all() for t in (x, w1, w2))


def _head_loss(run, weights, scale=1.0, dtype=torch.float32, **more):
    hidden = (torch.randn(24, D, dtype=torch.float64) * scale).to(dtype)
    head, labels = torch.randn(V, D, dtype=torch.float64).to(dtype), torch.randint(V, (24,))
    if scale > 1:  # one class dominates, and it is right
        labels = (hidden.double() @ head.double().T).argmax(-1)

    def loss(hidden, head):
        each = F.cross_entropy((hidden @ head.T).float(), labels, reduction="none", **more)
        return (each * weights).sum()

    found = []
    for function, kind in ((run(loss), dtype), (loss, dtype), (loss, torch.float64)):
        tensors = [t.detach().to(kind).requires_grad_() for t in (hidden, head)]
        function(*tensors).backward()
        found.append([t.grad for t in tensors])
    return zip(*found, strict=True)


@reported("Liger 1329")
def gradients_of_confident_tokens_stay(run):
    for ours, eager, exact in _head_loss(run, torch.ones(24), scale=1.2, dtype=BF16):
        assert relative(ours, exact) <= 1.2 * relative(eager, exact)


@reported("Liger 1298")
def a_loss_of_each_token_takes_weights_from_data(run):
    for ours, _, exact in _head_loss(run, torch.rand(24)):
        assert relative(ours, exact) < 1e-5


@reported("Liger 1283, NeMo RL 2363, fla 1253")
def a_head_in_float32_trains_under_autocast_tied_or_frozen(run):
    for tied, frozen in ((False, False), (True, False), (False, True)):
        table, head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        if tied:
            head.weight = table.weight
        head.weight.requires_grad_(not frozen)
        block, tokens = Block(), torch.randint(V, (2, 12))

        def step(tokens, table=table, head=head, block=block):
            logits = head(block(table(tokens)))
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

        compiled = run(step)
        with torch.autocast("cpu", BF16):
            loss = compiled(tokens)
        loss.backward()
        assert loss.dtype == torch.float32
        assert (head.weight.grad is None) == frozen
        assert table.weight.grad.isfinite().all()


@reported("Liger 1350, ms-swift 9797")
def numbers_and_tensors_of_no_dimension_compile_once(run):
    linear, scale = nn.Linear(D, D), torch.tensor(0.5, dtype=torch.float64)

    def f(x, scale, cap):
        return cap * torch.tanh(F.rms_norm(linear(x), (D,), eps=1e-5) * scale / cap)

    compiled, x = run(f), torch.randn(8, D)
    for step in range(4):
        y = compiled(x, scale + step, 30.0)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, f(x, scale + step, 30.0))
    assert counters["stats"]["unique_graphs"] <= 1


@reported("pt 150859")
def rowwise_fp8_behind_a_checkpointed_norm_has_a_gradient(run):
    float8 = pytest.importorskip("torchao.float8")
    needs_scaled_mm()
    block = Block(saved=True).to(BF16)
    recipe = float8.Float8LinearConfig.from_recipe_name("rowwise")
    float8.convert_to_float8_training(block, config=recipe)
    x = torch.randn(16, D, dtype=BF16, requires_grad=True)
    found = []
    for function in (run(block), block):
        block.zero_grad()
        function(x).float().square().mean().backward()
        found.append([p.grad.clone() for p in block.parameters()])
    for ours, eager in zip(*found, strict=True):
        assert relative(ours, eager) < 0.05


class Router(nn.Module):
    """Each token is multiplied with the row of one expert. All experts are ties but for less than
    a rounding, so that a product that is rounded otherwise chooses another one."""

    def __init__(self, experts: int = 8):
        super().__init__()
        self.norm, self.up = nn.RMSNorm(D), nn.Linear(D, D)
        self.scores = nn.Linear(D, experts, bias=False)
        self.rows = nn.Parameter(torch.arange(1.0, experts + 1)[:, None].repeat(1, D))
        with torch.no_grad():
            near = self.scores.weight[:1] * (1 + 2**-8 * torch.randn(experts, D))
            self.scores.weight.copy_(near)

    def forward(self, x):
        h = self.norm(x + self.up(x))
        return self.rows[self.scores(h).argmax(-1)]


@reported("pt 186572")
def a_recomputed_router_chooses_the_same_experts(run):
    model = Router().to(BF16)
    x = torch.randn(256, D, dtype=BF16, requires_grad=True)
    y = run(lambda x: checkpoint(model, x, use_reentrant=False))(x)
    y.sum().backward()
    chosen = torch.bincount(y[:, 0].detach().long() - 1, minlength=8)
    assert (chosen > 0).sum() > 2
    assert torch.equal(model.rows.grad[:, 0].long(), chosen)


@reported("ao 4652, 4657, pt 188841")
def small_fp8_layers_keep_nan_in_its_row_and_all_columns_of_gradients(run):
    float8 = pytest.importorskip("torchao.float8")
    needs_scaled_mm()
    recipe = float8.Float8LinearConfig.from_recipe_name("rowwise")
    for rows, columns, depth in ((16, 16, 32), (48, 32, 16)):
        layer = nn.Sequential(nn.Linear(depth, columns, bias=False)).to(BF16)
        float8.convert_to_float8_training(layer, config=recipe)
        compiled, x = run(layer), torch.randn(rows, depth, dtype=BF16)
        compiled(x).float().square().sum().backward()
        assert (layer[0].weight.grad != 0).any(0).all()
        x[3, 5] = float("nan")
        y = compiled(x)
        assert y[3].isnan().all()
        assert y[:3].isfinite().all()


@reported("pt 197838")
def a_smaller_budget_keeps_no_more(run):
    """Nor more than its share of what eager keeps."""
    model, x = nn.Sequential(Block(), Block(), Block()), torch.randn(64, D)

    def held(function, share):
        kept: dict[int, int] = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch._dynamo.reset()
        saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with functorch_config.patch(activation_memory_budget=share), saved:
            function(x).sum().backward()
        return sum(kept.values())

    eager, compiled = held(model, 1.0), run(model)
    found = [held(compiled, step / 5) for step in range(6)]
    assert found == sorted(found)
    if compiled is not model:
        assert all(f - found[0] <= i / 5 * (eager - found[0]) for i, f in enumerate(found)), found
        assert found[0] < found[-1]


@reported("pt 189895")
def lengths_of_documents_begin_with_zero(run):
    mask = torch.rand(16, 256) < 0.7

    def f(mask):
        return F.pad(mask.sum(-1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))

    assert torch.equal(run(f)(mask), f(mask))


@reported("hf 41827")
def a_document_does_not_read_the_one_before(run):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=D, intermediate_size=H, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=V, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    positions = torch.arange(16)[None] % 8
    first = torch.randint(V, (1, 16))
    other = first.clone()
    other[:, :8] = (other[:, :8] + 1) % V
    compiled = run(lambda tokens: model(tokens, position_ids=positions).logits)
    with torch.no_grad():
        a, b = compiled(first), compiled(other)
    torch.testing.assert_close(a[:, 8:], b[:, 8:])
    assert not torch.allclose(a[:, :8], b[:, :8])


@reported("pt 193193")
def checkpointed_blocks_are_traversed_twice(run):
    model, x, y = Block(saved=True), torch.randn(8, D), torch.randn(8, D)
    f = lambda x, y: (model(x) * model(y)).sum()  # noqa: E731
    found = []
    for function in (run(f), f):
        model.zero_grad()
        function(x, y).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*found)


@reported("pt 135892, 161191")
def evaluation_in_inference_mode_comes_before_training(run):
    model, x = nn.Sequential(Block(), Block()), torch.randn(8, D)
    compiled = run(model)
    with torch.inference_mode():
        before = compiled(x).clone()
    compiled(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)
    with torch.inference_mode():
        assert not torch.allclose(compiled(x), before)
        torch.testing.assert_close(compiled(x), model(x))


@reported("torchtune 721")
def adapters_that_are_disabled_change_the_result(run):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["gate", "up"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(Block()), config).eval()
    compiled, x = run(model), torch.randn(8, D)
    with torch.no_grad():
        adapted = compiled(x)
        with model.disable_adapter():
            plain = compiled(x)
            torch.testing.assert_close(plain, model(x))
        assert not torch.allclose(adapted, plain)
        torch.testing.assert_close(compiled(x), adapted)


@reported("Automodel 2389")
def a_policy_that_saves_every_second_product_trains(run):
    model, x = Block(), torch.randn(8, D, requires_grad=True)

    def contexts():
        seen = [0, 0]

        def policy(how, op, *_args, **_kwargs):
            if op not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen[how.is_recompute] += 1
            odd = seen[how.is_recompute] % 2
            return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    saved = lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts)  # noqa: E731
    (ours,) = torch.autograd.grad(run(saved)(x).sum(), x)
    (eager,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(ours, eager)


@reported("pt 162410, 184113, 191433")
def what_is_written_in_place_is_read_afterwards(run):
    linear, w = nn.Linear(D, D), torch.randn(D)

    def flipped(x):
        x = linear(x)
        x.copy_(x.flip(-1))
        return F.rms_norm(x, (D,), w) @ linear.weight

    def rotated(x):
        x = linear(x).clone()
        half = x[..., : D // 2]
        half.mul_(2.0).add_(x[..., D // 2 :])
        x += linear(x)
        return x

    for f in (flipped, rotated):
        for rows in (8, 96):
            x = torch.randn(rows, D)
            with torch.no_grad():
                torch.testing.assert_close(run(f)(x), f(x), rtol=1e-4, atol=1e-4)


#: Torch's own, which it does without us: nothing of ours is in it.
NOT_OURS = {
    "a_budget_draws_no_second_mask": ("torch.compile",),
    "rows_of_no_expert_reach_no_gradient": ("eager", "torch.compile"),
}
BACKENDS = {
    "eager": lambda function: function,
    "torch.compile": functools.partial(torch.compile, backend="aot_eager_decomp_partition"),
    "coda": functools.partial(torch.compile, backend=coda, options={"reference": True}),
}


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_no_fault_here(name, backend):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    if backend in NOT_OURS.get(name.split()[0], ()):
        pytest.skip("a fault of torch's")
    PROGRAMS[name](BACKENDS[backend])
