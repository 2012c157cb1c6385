# SPDX-License-Identifier: Apache-2.0
"""What passes and patterns look for, each as a small function of x (B, T, 16) and of weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

HEAD, V = 16, 96
EPS = 1e-2  # large beside what it is added to, so that one in the wrong place shows
sdpa = F.scaled_dot_product_attention


def stream(x, w):
    return x + F.linear(x, w)


def rms(x, w, gamma, a):
    return F.linear(F.rms_norm(stream(x, w), (x.shape[-1],), gamma, EPS), a).sin()


def layer(x, w, gamma, beta, a):
    x = stream(F.layer_norm(x, (x.shape[-1],)).cumsum(0), w) + x
    return F.linear(F.layer_norm(x, (x.shape[-1],), gamma, beta, EPS), a)


def in_place(x, w, gamma):
    x = x @ w
    return x * x.pow(2).mean(-1, keepdim=True).add_(EPS).rsqrt_() * gamma


def gated(cut):
    def function(x, both):
        gate, up = cut(F.linear(x, both))
        return F.silu(gate) * up

    return function


def labels(x):
    return (torch.arange(x[..., 0].numel()) % V).view(x.shape[:-1])


def logits(x, w):
    return F.linear(x.tanh(), w)


def loss(x, w):
    return F.cross_entropy(logits(x, w).view(-1, V), labels(x).flatten())


def likelihood(x, w):
    return F.log_softmax(logits(x, w), -1).gather(-1, labels(x)[..., None]).mean()


def heads(x, *weights):
    return [F.linear(x, w).view(*x.shape[:2], -1, HEAD).transpose(1, 2) for w in weights]


def masked(x, q, k, v):
    steps = torch.arange(x.shape[1])
    return sdpa(*heads(x, q, k, v), attn_mask=steps[:, None] >= steps)


def grouped(x, q, k, v):
    q, k, v = heads(x, q, k, v)
    return sdpa(q, *(t.repeat_interleave(2, 1) for t in (k, v)), is_causal=True).sin()


def data_masked(x, q, k, v):
    mask = (x.detach()[:, None, :, :1] > 0) | torch.eye(x.shape[1], dtype=torch.bool)
    return sdpa(*heads(x, q, k, v), attn_mask=mask).sin()


def angles(x):
    steps = torch.arange(x.shape[1], dtype=x.dtype)
    return steps[:, None] * 0.5 ** torch.arange(HEAD, dtype=x.dtype)


def rotary(x, w):
    (q,) = heads(x, w)
    return rotated(q, x)


def rotary_in_kernels(x, w):
    (q,) = heads(x, w)
    return rotated(q.cumsum(2), x)


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


def looked_up(x, table, w):
    return F.linear(F.embedding(labels(x) % 7, table) @ w + x, table)


def loss_and_logits(x, w):
    z = logits(x, w)
    return F.cross_entropy(z.view(-1, V), labels(x).flatten()), z


def rms_returned(x, w, gamma, a):
    n = F.rms_norm(stream(x, w), (x.shape[-1],), gamma, EPS)
    return F.linear(n, a), n


def rms_of_no_product(x, w, gamma, a):
    return F.linear(F.rms_norm(x.sin(), (x.shape[-1],), gamma, EPS), a) + w.sum()
