# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in the semantic vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coda_inductor.semantic.define import LIB, define


def swiglu_definition(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` elementwise, in the promoted dtype of its inputs.

    Written as users write it, so that what stays unfused is exactly what Inductor would have seen.
    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202), section 2.
    """
    return F.silu(gate) * up


def swiglu_backward_definition(
    dy: Tensor, gate: Tensor, up: Tensor, need_dgate: bool, need_dup: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of SwiGLU: ``dgate = dy * up * silu'(gate)`` and ``dup = dy * silu(gate)``, each
    typed like its input. A gradient that is not needed comes back as an empty tensor.
    """
    dgate, dup = gate.new_empty(0), up.new_empty(0)
    if need_dgate:
        dgate = torch.ops.aten.silu_backward((dy * up).to(gate.dtype), gate)
    if need_dup:
        dup = (dy * F.silu(gate)).to(up.dtype)
    return dgate, dup


swiglu = define("swiglu(Tensor gate, Tensor up) -> Tensor", swiglu_definition, pointwise=True)


swiglu_backward = define(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up, bool need_dgate, bool need_dup) "
    "-> (Tensor, Tensor)",
    swiglu_backward_definition,
    pointwise=True,
)


def _save_swiglu(ctx, inputs, output) -> None:  # noqa: ARG001 (the signature is torch's)
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx, dy: Tensor):
    need_dgate, need_dup = ctx.needs_input_grad
    dgate, dup = swiglu_backward(dy, *ctx.saved_tensors, need_dgate, need_dup)
    return dgate if need_dgate else None, dup if need_dup else None


torch.library.register_autograd(
    "coda_inductor::swiglu", _differentiate_swiglu, setup_context=_save_swiglu, lib=LIB
)
