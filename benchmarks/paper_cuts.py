# SPDX-License-Identifier: Apache-2.0
"""The kernels of CODA's paper (arXiv 2605.19269) as it cuts them from a Llama, in plain torch and
with the kernels that Liger and QuACK offer for the same.

A cut is written once, over a *kit* of operations. ``x0`` (rows, d) is the residual stream, ``y``
(rows, d) what the attention gives.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .measure import device

EPS, HEAD = 1e-6, 128
Outputs = tuple[Tensor, ...]


class Torch:
    """Operations as transformers writes them."""

    linear = staticmethod(F.linear)

    def norm(self, x: Tensor, weight: Tensor) -> Any:
        return F.rms_norm(x, weight.shape, weight, EPS)

    def add_norm(self, y: Tensor, w: Tensor, x0: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        x = x0 + self.linear(y, w)
        return x, self.norm(x, weight)

    def gated(self, h: Any, cut: Cut) -> Tensor:
        return F.silu(F.linear(h, cut.gate)) * F.linear(h, cut.up)

    def mlp(self, h: Any, x: Tensor, cut: Cut) -> tuple[Tensor, Any]:
        return self.add_norm(self.gated(h, cut), cut.down, x, cut.norm2)

    def rotary(self, h: Any, cut: Cut) -> Outputs:
        heads = (self.linear(h, w).view(1, -1, len(w) // HEAD, HEAD) for w in (cut.q, cut.k))
        return self.rotate(*(each.transpose(1, 2) for each in heads), cut.cos, cut.sin)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        return apply_rotary_pos_emb(q, k, cos, sin)

    def attention(self, h: Any, cut: Cut) -> Outputs:
        return *self.rotary(h, cut), self.linear(h, cut.v)

    def loss(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)


class Liger(Torch):
    """``liger_kernel.transformers.functional`` around cuBLAS. Its SwiGLU's backward writes
    over what the forward saved: a second backward of one graph works on other numbers."""

    def __init__(self) -> None:
        self.library = importlib.import_module("liger_kernel.transformers.functional")

    def norm(self, x: Tensor, weight: Tensor) -> Any:
        return self.library.liger_rms_norm(x, weight, EPS)

    def add_norm(self, y: Tensor, w: Tensor, x0: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        h, x = self.library.liger_fused_add_rms_norm(F.linear(y, w), x0, weight, EPS)
        return x, h

    def gated(self, h: Any, cut: Cut) -> Tensor:
        return self.library.liger_swiglu(F.linear(h, cut.gate), F.linear(h, cut.up))

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
        return self.library.liger_rope(q, k, cos, sin)

    def loss(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return self.library.liger_fused_linear_cross_entropy(x, weight, target)


class Quack(Torch):
    """QuACK's kernels put together by hand: without gradients the norm is in the epilogues of the
    GEMMs around it, with gradients its autograd functions are used."""

    def __init__(self) -> None:
        names = ("gemm_interface", "linear", "mlp", "rmsnorm", "rotary", "linear_cross_entropy")
        self.gemms, *self.more = (importlib.import_module(f"quack.{name}") for name in names)

    def linear(self, x: Any, w: Tensor) -> Tensor:  # type: ignore[override]
        if isinstance(x, tuple):
            return self.gemms.gemm_norm_act(x[0], w.mT, x[1], tuned=False)[1]
        return self.more[0].linear_func(x, w, tuned=False)

    def norm(self, x: Tensor, weight: Tensor) -> Any:
        return self.more[2].rmsnorm(x, weight, eps=EPS)

    def add_norm(self, y: Tensor, w: Tensor, x0: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        if torch.is_grad_enabled():
            z = self.linear(y, w)
            h, x = self.more[2].rmsnorm(z, weight, residual=x0, eps=EPS, prenorm=True)
            return x, h
        x = torch.empty_like(x0)
        return x, self.gemms.gemm_rms(y, w.mT, x0, weight, premult_out=x, eps=EPS, tuned=False)

    def gated(self, h: Any, cut: Cut) -> Tensor:
        if torch.is_grad_enabled():
            raise NotImplementedError("QuACK's SwiGLU has a backward only with the GEMM behind it")
        plain = not isinstance(h, tuple)
        gated = self.gemms.gemm_act if plain else self.gemms.gemm_norm_act
        x, more = (h, {}) if plain else (h[0], {"rstd": h[1]})
        return gated(x, cut.alternating.mT, activation="swiglu", store_preact=False,
                     tuned=False, **more)[1]  # fmt: skip

    def mlp(self, h: Any, x: Tensor, cut: Cut) -> tuple[Tensor, Any]:
        if not torch.is_grad_enabled():
            return super().mlp(h, x, cut)
        z = self.more[1].mlp_func(h, cut.alternating, cut.down, "swiglu", tuned=False)
        h, x = self.more[2].rmsnorm(z, cut.norm2, residual=x, eps=EPS, prenorm=True)
        return x, h

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
        rotated, half = self.more[3].apply_rotary_emb, HEAD // 2
        return tuple(
            rotated(each.transpose(1, 2), cos[0, :, :half], sin[0, :, :half]).transpose(1, 2)
            for each in (q, k)
        )

    def loss(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        function = self.more[4].chunked_linear_cross_entropy
        return function(x, weight, target, tuned=False)


def _residual(kit: Torch, w: Cut, y: Tensor, x0: Tensor) -> Outputs:
    x, h = kit.add_norm(y, w.o, x0, w.norm1)
    return x, kit.linear(h, w.alternating)


def _swiglu(kit: Torch, w: Cut, x0: Tensor) -> Outputs:
    return (kit.gated(kit.norm(x0, w.norm1), w),)


def _rotary(kit: Torch, w: Cut, x0: Tensor) -> Outputs:
    return kit.rotary(x0, w)


def _head(kit: Torch, w: Cut, x0: Tensor) -> Outputs:
    return (kit.loss(x0, w.head, w.target),)


def _layer(kit: Torch, w: Cut, y: Tensor, x0: Tensor) -> Outputs:
    x, h = kit.add_norm(y, w.o, x0, w.norm1)
    x, h = kit.mlp(h, x, w)
    return x, *kit.attention(h, w)


#: Name -> function, inputs, weights.
CUTS: dict[str, tuple[Callable[..., Outputs], int, str]] = {
    "residual": (_residual, 2, "o norm1 alternating"),
    "swiglu": (_swiglu, 1, "norm1 gate up"),
    "rotary": (_rotary, 1, "q k"),
    "head": (_head, 1, "head"),
    "layer": (_layer, 2, "o norm1 gate up down norm2 q k v"),
}


class Cut(nn.Module):
    """The weights of one cut, bfloat16 on the GPU; they have no gradients unless ``training``."""

    def __init__(self, name: str, d: int, rows: int, vocabulary: int, training: bool = False):
        super().__init__()
        self.name = name
        f = -(-(8 * d // 3) // 256) * 256
        shapes = dict.fromkeys("oqkv", (d, d)) | {"gate": (f, d), "up": (f, d), "down": (d, f)}
        shapes |= {"head": (vocabulary, d), "norm1": (d,), "norm2": (d,), "alternating": (2 * f, d)}
        self.function, inputs, names = CUTS[name]
        torch.manual_seed(0)
        with torch.device(device()):
            for each in names.split():
                weight = torch.randn(shapes[each]) * shapes[each][-1] ** -0.5
                if each.startswith("norm"):
                    weight = 1 + 0.1 * torch.randn(d)
                self.register_parameter(each, nn.Parameter(weight.bfloat16(), training))
            if "gate" in names:
                pair = torch.stack([self.gate, self.up], 1).detach()
                self.register_buffer("alternating", pair.flatten(0, 1))
            angles = torch.arange(rows)[:, None] / 1e4 ** (torch.arange(0, HEAD, 2) / HEAD)
            angles = torch.cat([angles, angles], 1)[None]
            for name in ("cos", "sin"):
                self.register_buffer(name, getattr(angles, name)().bfloat16())
            self.target = torch.randint(vocabulary, (rows,))
            self.inputs = [torch.randn(rows, d).bfloat16() for _ in range(inputs)]
