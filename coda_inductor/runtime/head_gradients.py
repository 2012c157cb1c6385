# SPDX-License-Identifier: Apache-2.0
"""The custom op ``coda_inductor::head_gradient``: what attention's backward pass makes of queries
or keys becomes the gradient of their projection's product, in one pass.

It rotates back, takes the gradient of a norm of each head, and writes rows: as they are, for the
dgrad, and times the row scale of a deferred norm, for the wgrad. On CUDA that is one Triton kernel
(``mainloop/head_gradients.py``), elsewhere plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coda_inductor.log import warn_once
from coda_inductor.semantic.norms import rms_norm_backward_definition, rms_rstd
from coda_inductor.semantic.rotary import rotate_definition

_LIBRARY = torch.library.Library("coda_inductor", "FRAGMENT")
_LIBRARY.define(
    "head_gradient(Tensor dy, Tensor cos, Tensor sin, Tensor? z, Tensor? weight, Tensor? scale, "
    "float eps, int distance, bool paired, bool inverse, bool dweight) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
#: The op, as graphs hold it.
HEAD_GRADIENT = torch.ops.coda_inductor.head_gradient.default


def head_gradient(
    dy: Tensor,
    cos: Tensor,
    sin: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    distance: int,
    paired: bool,
    inverse: bool,
    dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of what was normalized (if ``z`` is given) and rotated.

    Args:
        dy: (B, H, T, D) in 16 or 32 bits, any strides: the gradient of the rotated heads.
        cos: (B or 1, 1, T or 1, W), a table of the rotation that ``dy`` is put through; see
            ``semantic.rotary.rotate_definition``. W is D, or D / 2 where ``paired``.
        sin: the other table.
        z: like ``dy``: what was normalized, by ``semantic.norms.rms_norm_definition``, if anything.
        weight: (D,), that norm's, or None.
        scale: (B * T, 1) float32, a factor of each row of the second result, or None.
        eps: that norm's.
        distance: of the columns of a pair: D / 2, or 1 for neighbours.
        paired: have the tables one angle a pair?
        inverse: is ``dy`` put through the transposed rotation?
        dweight: is the weight's gradient wanted?

    Returns:
        dz (B, T, H * D), contiguous, typed like ``z`` or else ``dy``; dz times ``scale``; the
        gradient of ``weight``, typed like it. What is not wanted has the shape (0,).
    """
    d = rotate_definition(dy, cos, sin, distance, paired, inverse, False, dy.dtype)
    gradient = dy.new_empty(0)
    if z is not None:
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        needs = [True, dweight]
        d, gradient = rms_norm_backward_definition(d, z, weight, rms_rstd(wide, eps), needs)
    rows = d.transpose(1, 2).flatten(2).contiguous()
    if scale is None:
        return rows, dy.new_empty(0), gradient
    scaled = rows.to(scale.dtype) * scale.view(*rows.shape[:2], 1)
    return rows, scaled.to(rows.dtype), gradient


def _empty(dy, z, weight, scale, dweight):
    b, h, t, d = dy.shape
    rows = dy.new_empty((b, t, h * d), dtype=dy.dtype if z is None else z.dtype)
    gradient = weight.new_empty(d) if dweight and weight is not None else dy.new_empty(0)
    return rows, rows.new_empty(0) if scale is None else torch.empty_like(rows), gradient


@torch.library.register_fake("coda_inductor::head_gradient", lib=_LIBRARY)
def _fake(dy, cos, sin, z, weight, scale, eps, distance, paired, inverse, dweight):  # noqa: ARG001
    return _empty(dy, z, weight, scale, dweight)


def _cuda(dy, cos, sin, z, weight, scale, eps, distance, paired, inverse, dweight):
    if dy.numel():
        try:
            return _launched(
                dy, cos, sin, z, weight, scale, eps, distance == 1, paired, inverse, dweight
            )
        except Exception as error:
            warn_once("head_gradient", repr(error), to="torch's ops")
    return head_gradient(dy, cos, sin, z, weight, scale, eps, distance, paired, inverse, dweight)


def _launched(dy, cos, sin, z, weight, scale, eps, neighbours, paired, inverse, dweight):
    from coda_inductor.mainloop import head_gradients as kernel

    dz, scaled, gradient = _empty(dy, z, weight, scale, dweight)
    partials = None
    if gradient.numel():
        b, h, t, d = dy.shape
        blocks, groups, _, _ = kernel.programs(b * t, h, d)
        partials = torch.empty(blocks * groups, d, dtype=torch.float32, device=dy.device)
    dy, cos, sin, z = (x if x is None or x.stride(3) == 1 else x.contiguous()
                       for x in (dy, cos, sin, z))  # fmt: skip
    weight, scale = (x if x is None else x.contiguous() for x in (weight, scale))
    kernel.head_gradient(
        dy, cos, sin, z, weight, scale, eps, neighbours=neighbours, paired=paired, inverse=inverse,
        dz=dz, scaled=None if scale is None else scaled, partials=partials,
    )  # fmt: skip
    if partials is not None:
        gradient = partials.sum(0).to(gradient.dtype)
    return dz, scaled, gradient


def _direct(dy, *others):
    """The op without the dispatcher (``runtime.direct``)."""
    return _cuda(dy, *others) if dy.is_cuda else HEAD_GRADIENT(dy, *others)


HEAD_GRADIENT.direct = _direct  # type: ignore[attr-defined]
_LIBRARY.impl("head_gradient", head_gradient, "CompositeExplicitAutograd")
_LIBRARY.impl("head_gradient", _cuda, "CUDA")
