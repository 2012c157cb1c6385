# SPDX-License-Identifier: Apache-2.0
"""Products of one tensor with several small weights, each behind a dropout of its own (LoRA).

For x (..., K) and weights A_i (r, K), i = 0 ... count - 1::

    t_i = (keep_i * x / (1 - p)) A_i^T                           (..., r)
    dA_i = dt_i^T (keep_i * x) / (1 - p)
    dx = sum over i of keep_i * (dt_i A_i) / (1 - p)

A mask is a function of a seed: both directions draw it, and neither a mask nor a masked x is in
memory. Each direction is one Triton kernel on CUDA (``mainloop/dropout.py``), else plain torch.

A mask has 16 bits of Philox 4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011) for each element, so that p is a multiple of 2**-16; x is scaled for this p. The key is the
seed. A counter (k // 8, m, number of the mask) has the bits of eight elements of row m.
"""

import torch
from torch import Tensor

from coda_inductor.semantic.define import opaque, schema_text

#: Of Philox: as few as pass BigCrush (the paper's table 2); they take longer than reading x.
ROUNDS = 7
#: Each element has one of so many draws.
DRAWS = 2**16
_WORD = 2**32 - 1
_FACTORS, _STEPS = (0xCD9E8D57, 0xD2511F53), (0x9E3779B9, 0xBB67AE85)


def dropped(p: float) -> int:
    """The number of the ``DRAWS`` values that drop an element."""
    return round(p * DRAWS)


def scale(p: float) -> float:
    """The factor of the elements that are not dropped."""
    return DRAWS / (DRAWS - dropped(p))


def keep_mask(seed: Tensor, number: int, m: int, k: int, p: float) -> Tensor:
    """The mask of this number, (m, k) bool: False drops an element. ``seed``: one int64."""
    device = seed.device
    words = [
        torch.arange((k + 7) // 8, device=device)[None, :],
        torch.arange(m, device=device)[:, None],
        torch.full((1, 1), number, device=device),
        torch.zeros((1, 1), dtype=torch.int64, device=device),
    ]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(ROUNDS):
        high, low = words[2] * _FACTORS[0], words[0] * _FACTORS[1]  # 64 bits, with any sign
        words = [
            ((high >> 32) & _WORD) ^ words[1] ^ keys[0], high & _WORD,
            ((low >> 32) & _WORD) ^ words[3] ^ keys[1], low & _WORD,
        ]  # fmt: skip
        keys = [(key + step) & _WORD for key, step in zip(keys, _STEPS, strict=True)]
    halves = [half for word in words for half in (word % DRAWS, word // DRAWS)]
    return torch.stack(halves, -1).flatten(1)[:, :k] >= dropped(p)


def dropout_linear(
    x: Tensor, weight: Tensor, seed: Tensor, first: int, count: int, p: float
) -> Tensor:
    """The products t_i of x under each mask, side by side.

    Args:
        x: (..., K), of any floating dtype. After masking it is rounded to the dtype of ``weight``.
        weight: (count * r, K), all A_i, one below the other.
        seed: one int64.
        first: the number of the first mask.
        count: the number of weights and masks.
        p: the probability that an element is dropped.

    Returns:
        (..., count * r) in the dtype of ``weight``; sums are at least float32.
    """
    rows, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(weight.dtype, torch.float32)
    (m, k), parts = rows.shape, []
    for i, part in enumerate(weight.chunk(count)):
        masked = (rows * keep_mask(seed, first + i, m, k, p)).to(weight.dtype)
        parts.append((masked.to(wide) @ part.t().to(wide) * scale(p)).to(weight.dtype))
    return torch.cat(parts, 1).view(*x.shape[:-1], weight.shape[0])


def dropout_linear_backward(
    dt: Tensor, x: Tensor, weight: Tensor, seed: Tensor, first: int, count: int, p: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of ``x`` and ``weight`` if ``needs`` says so, else tensors of shape (0,);
    ``dt`` is the gradient of the result."""
    dx, dweight = gradients(dt, x, weight, seed, first, count, p, needs)
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows, dt = x.reshape(-1, x.shape[-1]), dt.reshape(-1, weight.shape[0])
    (m, k), total = rows.shape, torch.zeros(rows.shape, dtype=wide, device=x.device)
    for i, part in enumerate(weight.chunk(count)):
        keep, dt_part = keep_mask(seed, first + i, m, k, p), dt.chunk(count, 1)[i].to(wide)
        total += dt_part @ part.to(wide) * keep
        if needs[1]:
            masked = (rows * keep).to(weight.dtype).to(wide)
            dweight.chunk(count)[i].copy_(dt_part.t() @ masked * scale(p))
    if needs[0]:
        dx.copy_((total * scale(p)).view(x.shape))
    return dx, dweight


def gradients(dt, x, weight, seed, first, count, p, needs):  # noqa: ARG001 (as the op)
    """Uninitialized results of :func:`dropout_linear_backward`."""
    return x.new_empty(x.shape if needs[0] else 0), weight.new_empty(
        weight.shape if needs[1] else 0
    )


_SCHEMA = schema_text(dropout_linear_backward, "dx dweight")
BACKWARD = opaque(_SCHEMA, dropout_linear_backward, gradients)
FORWARD = opaque(
    schema_text(dropout_linear),
    dropout_linear,
    lambda x, weight, *_: weight.new_empty(*x.shape[:-1], weight.shape[0]),
    gradient=BACKWARD,
    wrt=("x", "weight"),
)
