# SPDX-License-Identifier: Apache-2.0
"""FlexAttention in the place of SDPA beside a mask, on a GPU: as exact, also for each mask of a
batch, and zero where nothing is seen."""

import pytest
import torch
import torch.nn.functional as F
from layers import errors
from torch._dynamo.utils import counters

pytestmark = pytest.mark.gpu

sdpa = F.scaled_dot_product_attention


def causal(t):
    return torch.ones(t, t, dtype=torch.bool).tril()


def padded(t):
    """The padding's own queries see nothing; each row of the batch has other blocks."""
    begins = torch.tensor([[t // 2], [0], [t // 3]])
    return causal(t) & (torch.arange(t) >= begins)[:, None, None]


def packed(t):
    documents = (torch.arange(t)[None] >= torch.tensor([[t // 5], [t // 2], [t - 9]])).sum(0)
    return (causal(t) & (documents[:, None] == documents))[None, None]


def scattered(t):
    mask = torch.rand(3, 1, t, t) > 0.5
    mask[0, :, : t // 3] = mask[1, :, :, : t // 2] = mask[:, :, 7] = False
    mask[2, :, -128:, -128:] = True
    return mask


MASKS = {"padded": padded, "packed": packed, "scattered": scattered}


def attend(q, k, v, mask):
    n = q.shape[1] // k.shape[1]
    return sdpa(q, *(t.repeat_interleave(n, 1) for t in (k, v)), attn_mask=mask)


def step(function, tensors, mask, gradient):
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors)
    y = function(q, k, v, mask)
    y.backward(gradient.to(y.dtype))
    return y.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize(
    ("mask", "t", "heads", "d"),
    [("padded", 1024, (8, 2), 64), ("packed", 1000, (4, 4), 128), ("scattered", 300, (4, 2), 256)],
)
def test_as_exact_as_sdpa(mask, t, heads, d):
    """SDPA on cuDNN shows a row that sees nothing all keys, and hands its gradient on to them: it
    is given none there, and such rows are not compared."""
    torch.manual_seed(0)
    sizes = [(3, heads[0], t, d), (3, heads[1], t, d), (3, heads[1], t, d)]
    tensors = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in sizes]
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    seen = MASKS[mask](t).cuda()
    whole = seen.expand(3, 1, t, t)
    rows, keys = whole.any(-1)[..., None], whole.any(-2)[..., None]
    gradient = torch.randn(sizes[0], device="cuda")
    compiled = torch.compile(attend, backend="coda", options={"gate": "always", "strict": True})
    ours = step(compiled, tensors, seen, gradient)
    assert counters["coda"]["block_mask"] == 1
    y, *gradients = step(attend, tensors, seen, gradient * rows)
    exact = step(attend, [x.double() for x in tensors], seen, gradient)
    theirs = [y * rows, *gradients]
    for have, stock in zip(errors(ours, exact), errors(theirs, exact), strict=True):
        assert have <= 1.2 * stock
    assert ours[0].stride() == y.stride()
    for have, shown in zip(ours, (rows, rows, keys, keys), strict=True):
        assert have.isfinite().all()
        assert not have.masked_fill(shown, 0).any()


def of_a_size(q, k, v, _):
    position = torch.arange(q.shape[2], device=q.device)
    return attend(q, k, v, position[:, None] >= position)


@pytest.mark.parametrize("function", [attend, of_a_size])
def test_one_kernel_for_all_batches_and_lengths(function):
    """The second length and the second batch compile once more, for all that follow."""
    torch.manual_seed(0)
    compiled = torch.compile(function, backend="coda", options={"gate": "always", "strict": True})
    for batch, t in ((2, 1000), (2, 1300), (3, 700), (4, 2113), (2, 999)):
        tensors = [torch.randn(batch, n, t, 128, device="cuda").bfloat16() for n in (4, 2, 2)]
        last = torch.arange(batch, device="cuda")[:, None, None, None] * 150
        data = packed(t).cuda() & (torch.arange(t, device="cuda") < t - last)
        seen = data if function is attend else causal(t).cuda()
        gradient = torch.randn(batch, 4, t, 128, device="cuda") * seen.any(-1)[..., None]
        ours, theirs = (step(f, tensors, seen, gradient) for f in (compiled, attend))
        exact = step(attend, [x.double() for x in tensors], seen, gradient)
        ours, theirs = ((y * seen.any(-1)[..., None], *more) for y, *more in (ours, theirs))
        for have, stock in zip(errors(ours, exact), errors(theirs, exact), strict=True):
            assert have <= 1.2 * stock
    assert counters["coda"]["block_mask" if function is attend else "constant_mask"] == 3
