# SPDX-License-Identifier: Apache-2.0
"""What passes and patterns look for, each as a small function of x (B, T, 16) and of weights,
on any device."""

import torch
import torch.nn.functional as F

from zoo import experts as mixture

HEAD, V = 16, 96
EPS = 1e-2  # large beside what it is added to, so that one in the wrong place shows
sdpa = F.scaled_dot_product_attention


def stream(x, w):
    return x + F.linear(x, w)


def norm(x, gamma):
    return F.rms_norm(x, (x.shape[-1],), gamma, EPS)


def rms(x, w, gamma, a):
    return F.linear(norm(stream(x, w), gamma), a).sin()


def joined(x, up, down, bias=None):
    return F.linear(torch.cat([x.sin(), F.gelu(F.linear(x, up))], -1), down, bias)


def in_place(x, w, gamma):
    x = x @ w
    return x * x.pow(2).mean(-1, keepdim=True).add_(EPS).rsqrt_() * gamma


def gated(cut):
    def function(x, both):
        gate, up = cut(F.linear(x, both))
        return F.silu(gate) * up

    return function


def labels(x):
    return (torch.arange(x[..., 0].numel(), device=x.device) % V).view(x.shape[:-1])


def logits(x, w):
    return F.linear(x.tanh(), w)


def loss(x, w):
    return F.cross_entropy(logits(x, w).view(-1, V), labels(x).flatten())


def heads(x, *weights):
    return [F.linear(x, w).view(*x.shape[:2], -1, HEAD).transpose(1, 2) for w in weights]


def masked(x, q, k, v):
    steps = torch.arange(x.shape[1], device=x.device)
    return sdpa(*heads(x, q, k, v), attn_mask=steps[:, None] >= steps)


def grouped(x, q, k, v):
    q, k, v = heads(x, q, k, v)
    return sdpa(q, *(t.repeat_interleave(2, 1) for t in (k, v)), is_causal=True).sin()


def data_masked(x, q, k, v):
    own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    mask = (x.detach()[:, None, :, :1] > 0) | own
    return sdpa(*heads(x, q, k, v), attn_mask=mask).sin()


def angles(x):
    steps = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    return steps[:, None] * 0.5 ** torch.arange(HEAD, dtype=x.dtype, device=x.device)


def rotary(x, w):
    (q,) = heads(x, w)
    return rotated(q, x)


def rotated(q, x):
    return q * angles(x).cos() + rotate_half(q) * angles(x).sin()


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def turned_complex(x, w):
    q, table = F.linear(x, w).view(*x.shape[:2], -1, HEAD), angles(x)[:, None, : HEAD // 2]
    turns = torch.polar(torch.ones_like(table), table)
    z = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2)) * turns
    return torch.view_as_real(z).flatten(3)


def experts(x, w13, w2, router):
    """In eager's order of choices, which autocast might change, from what no gradient reaches."""
    x = x.flatten(0, 1)
    ids = (x.detach().double() @ router.detach().double().T).topk(2)[1]
    weights = (x @ router.T).sigmoid().gather(1, ids)
    perm = torch.argsort(ids.reshape(-1))
    offs = torch.cumsum(mixture.histogram(ids.reshape(-1), perm), 0, dtype=torch.int32)
    a = mixture.halves(x[perm // 2], offs, mixture.plain, w13)
    return mixture.viewed(mixture.plain(a, w2.mT, offs), weights, perm, x, 2)


def clamped(x, gate, up):
    gate, up = F.linear(9 * x, gate).clamp(max=7.0), F.linear(9 * x, up).clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def clamped_otherwise(x, gate, up):
    gate, up = F.linear(9 * x, gate).clamp(max=7.0), F.linear(9 * x, up).clamp(min=-6.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def rms_by_hand(x, gamma):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gamma
