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
from torch.utils.checkpoint import checkpoint
from zoo.float8 import needs_scaled_mm
from zoo.layers import Gated

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


def block(saved: bool = False) -> nn.Module:
    """Norm, gate and residual; a checkpoint of all of it."""
    inner = Gated(D, H, norm=nn.RMSNorm, bias=True)
    return Saved(inner) if saved else inner


class Saved(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


def both(run, function, loss_of, model=None):
    """Pairs of gradients of parameters: of ``loss_of`` the compiled function, and of eager's."""
    model, found = model or function, []
    for call in (run(function), function):
        model.zero_grad()
        loss_of(call).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return zip(*found, strict=True)


@reported("pt 181568")
def a_cast_before_a_wider_bias_rounds(run):
    linear, bias = nn.Linear(D, D, bias=False).to(BF16), torch.randn(D)
    x = torch.randn(16, D, dtype=BF16)
    f = lambda x: F.rms_norm(linear(x).float() + bias, (D,))  # noqa: E731
    exact = F.rms_norm(F.linear(x.double(), linear.weight.double()) + bias, (D,))
    assert relative(run(f)(x), exact) <= 1.2 * relative(f(x), exact)


@reported("hf/peft 3020")
def lora_with_dropout_checkpoints_and_dynamic_sizes_trains(run):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["gate", "up", "down"], lora_dropout=0.05)
    model = peft.get_peft_model(nn.Sequential(block(saved=True), block(saved=True)), config)
    compiled = run(model)
    for rows in (8, 12, 16):
        compiled(torch.randn(2, rows, D)).square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and g.isfinite().all() for g in grads)


@reported("unsloth-zoo 1146")
def the_recompile_limit_may_fall_on_a_checkpoint(run):
    model, lengths = nn.Sequential(block(saved=True), block(saved=True)), (4, 6, 8, 10, 12)
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


@reported("Liger 1283, NeMo RL 2363, fla 1253")
def a_head_in_float32_trains_under_autocast_tied_or_frozen(run):
    for tied, frozen in ((False, False), (True, False), (False, True)):
        table, head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        if tied:
            head.weight = table.weight
        head.weight.requires_grad_(not frozen)
        inner, tokens = block(), torch.randint(V, (2, 12))

        def step(tokens, table=table, head=head, inner=inner):
            logits = head(inner(table(tokens)))
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
    model = block(saved=True).to(BF16)
    recipe = float8.Float8LinearConfig.from_recipe_name("rowwise")
    float8.convert_to_float8_training(model, config=recipe)
    x = torch.randn(16, D, dtype=BF16, requires_grad=True)
    for ours, eager in both(run, model, lambda call: call(x).float().square().mean()):
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


@reported("pt 193193")
def checkpointed_blocks_are_traversed_twice(run):
    model, x, y = block(saved=True), torch.randn(8, D), torch.randn(8, D)
    f = lambda x, y: (model(x) * model(y)).sum()  # noqa: E731
    for ours, eager in both(run, f, lambda call: call(x, y), model):
        torch.testing.assert_close(ours, eager)


@reported("pt 135892, 161191")
def evaluation_in_inference_mode_comes_before_training(run):
    model, x = nn.Sequential(block(), block()), torch.randn(8, D)
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


#: Torch's own, which it does without us: nothing of ours is in it.
NOT_OURS = {
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
    if backend in NOT_OURS.get(name.split()[0], ()):
        pytest.skip("a fault of torch's")
    PROGRAMS[name](BACKENDS[backend])
