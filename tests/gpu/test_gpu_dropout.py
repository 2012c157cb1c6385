# SPDX-License-Identifier: Apache-2.0
"""Adapters behind dropout on a GPU: the kernels draw the masks of plain torch, and round no worse;
a compiled model trains with them."""

import pytest
import torch
from oracle import NEEDS_KERNELS, hold
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from coda_inductor.mainloop import dropout as kernels
from coda_inductor.semantic import dropout as plain

pytestmark = NEEDS_KERNELS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32), (FP32, BF16)]


def given(m, k, rank, count, of_x=BF16, of_weights=BF16):
    """x, weights, and a gradient of their product."""
    x = torch.randn(m, k, device="cuda").to(of_x)
    weight = (torch.randn(count * rank, k, device="cuda") / k**0.5).to(of_weights)
    return x, weight, torch.randn(m, count * rank, device="cuda").to(of_weights)


def seed(number=2**62 + 3):
    return torch.tensor([number], device="cuda")


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize(("m", "k"), [(1, 8), (67, 200), (300, 1032)])
def test_each_mask_is_that_of_plain_torch(m, k, p):
    """Against weights of ones and zeros, products are the kept elements of x, and their gradient of
    x is the mask. Powers of two are exact in 16 bits."""
    rank, count = min(k, 16), 3
    x = torch.randint(-2, 3, (m, k), device="cuda").to(BF16).exp2()
    weight = torch.zeros(count, rank, k, device="cuda", dtype=BF16)
    columns = torch.randperm(k)[:rank]
    weight[:, torch.arange(rank), columns] = 1
    others = weight.view(-1, k), seed(), 7, count, p
    have = kernels.dropout_linear(x, *others)
    assert have.equal(plain.dropout_linear(x, *others))
    for i, part in enumerate(have.chunk(count, 1)):
        assert (part != 0).equal(plain.keep_mask(seed(), 7 + i, m, k, p)[:, columns])
    dt = torch.ones_like(have)
    for mine, theirs in zip(
        kernels.dropout_linear_backward(dt, x, *others, [True, True]),
        plain.dropout_linear_backward(dt, x, *others, [True, True]), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=0)


@pytest.mark.parametrize(("of_x", "of_weights"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "k", "rank", "count"),
    [(1, 64, 1, 1), (1000, 2048, 8, 3), (8192, 4096, 16, 3), (4099, 1000, 16, 2), (257, 520, 24, 4),
     (640, 1024, 64, 4), (640, 1024, 128, 2), (640, 2048, 256, 1), (129, 14336, 16, 1)],
)  # fmt: skip
def test_products_and_gradients(m, k, rank, count, of_x, of_weights):
    """To the bit at every call. Float32 is multiplied in tf32 or not, as torch's products are."""
    x, weight, dt = given(m, k, rank, count, of_x, of_weights)
    others = seed(), 0, count, 0.1
    exact = plain.dropout_linear(x.double(), weight.double(), *others)
    have = kernels.dropout_linear(x, weight, *others)
    hold(have, plain.dropout_linear(x, weight, *others), exact)
    assert have.equal(kernels.dropout_linear(x, weight, *others))
    for needs in ([True, True], [True, False], [False, True]):
        more = weight, *others, needs
        have = kernels.dropout_linear_backward(dt, x, *more)
        unfused = plain.dropout_linear_backward(dt, x, *more)
        more = weight.double(), *others, needs
        exact = plain.dropout_linear_backward(dt.double(), x.double(), *more)
        again = kernels.dropout_linear_backward(dt, x, weight, *others, needs)
        for mine, theirs, right, same in zip(have, unfused, exact, again, strict=True):
            hold(mine, theirs, right, needs)
            assert mine.equal(same)


def test_views_and_other_layouts():
    x, weight, dt = given(96, 2 * 256, 16, 2)
    for own in (x[:, ::2], x[:, :256], x[:, :256].view(2, 48, 256).transpose(0, 1)):
        lead, by = own.shape[:-1], weight[:, :256]
        others = by, seed(), 0, 2, 0.25
        have = kernels.dropout_linear(own, *others)
        assert have.equal(kernels.dropout_linear(own.contiguous(), *others))
        d = dt.view(*lead, -1)
        for mine, theirs in zip(
            kernels.dropout_linear_backward(d, own, *others, [True, True]),
            kernels.dropout_linear_backward(d, own.contiguous(), *others, [True, True]),
            strict=True,
        ):
            assert mine.equal(theirs)


class Lora(nn.Module):
    def __init__(self, k, n, rank=16, p=0.1):
        super().__init__()
        self.base = nn.Linear(k, n, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(k, rank, bias=False), nn.Linear(rank, n, bias=False)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return self.base(x) + self.b(self.a(self.dropout(x))) * 2.0


class Mlp(nn.Module):
    def __init__(self, d=512, f=1024):
        super().__init__()
        self.gate, self.up, self.down = Lora(d, f), Lora(d, f), Lora(f, d)
        self.checkpoint = False

    def inner(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpoint else self.inner(x)


def steps(model, x, **how):
    """Results and gradients of two steps from one seed."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="coda", **how)
    found = []
    for number in range(4):
        if number % 2 == 0:
            torch.manual_seed(3)
        model.zero_grad()
        x.grad = None
        y = compiled(x)
        y.float().square().mean().backward()
        trained = [p.grad for p in model.parameters() if p.requires_grad]
        found.append([t.clone() for t in (y.detach(), x.grad, *trained)])
    assert counters["coda"]["adapter_dropout"] == 3
    return found


@pytest.mark.parametrize("how", [{}, {"mode": "reduce-overhead"}, {"dynamic": True}], ids=str)
def test_steps_repeat_and_differ(how, no_fallbacks):
    """A seed has the same masks each time, and where the model is compiled again."""
    torch.manual_seed(0)
    model = Mlp().cuda().to(BF16)
    x = torch.randn(2, 1024, 512, device="cuda", dtype=BF16, requires_grad=True)
    runs = [steps(model, x, **how) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert all(map(torch.equal, first, second))
    one, two, three, four = runs[0]
    assert all(map(torch.equal, one + two, three + four))
    assert not any(map(torch.equal, one, two))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_backward_pass_draws_the_masks_of_the_forward_pass(checkpointed, no_fallbacks):
    """What is linear in x and in each weight is the product of each with its gradient. With other
    masks it would be half of that."""
    torch.manual_seed(0)
    layer = Lora(512, 512, p=0.5).cuda().to(BF16)
    layer.base.weight.zero_()
    x = torch.randn(2048, 512, device="cuda", dtype=BF16, requires_grad=True)

    def function(x):
        return checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)

    torch._dynamo.reset()
    y = torch.compile(function, backend="coda")(x)
    (y.float().square().sum() / 2).backward()
    for each in (x, layer.a.weight, layer.b.weight):
        found = (each.float() * each.grad.float()).sum()
        torch.testing.assert_close(found, y.float().square().sum(), rtol=2e-2, atol=0)


def test_masks_are_not_kept():
    """Of a step of four layers and 8192 rows, by torch.compile and by us."""
    peaks = []
    for backend in ("inductor", "coda"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Mlp(1024, 4096) for _ in range(4))).cuda().to(BF16)
        x = torch.randn(8192, 1024, device="cuda", dtype=BF16, requires_grad=True)
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            compiled(x).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, compiled
    assert peaks[1] < 0.85 * peaks[0], peaks
