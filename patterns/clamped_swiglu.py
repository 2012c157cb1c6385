# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's gate, whose two inputs are clamped, raised to one op.

Before (transformers' ``GptOssExperts._apply_gate``)::

    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    a = (up + 1) * (gate * torch.sigmoid(gate * alpha))

After::

    a = coda_inductor.clamped_swiglu_<digest>(gate, up, alpha, limit)

Why it is valid: it is the definition. Source: OpenAI's gpt-oss,
``swiglu`` in ``gpt_oss/torch/model.py``.

What it enables: gate and up projections of one input share a tile (rule R6), and only the GEMMs'
results are kept for the backward pass.

Refuses: gate and up of different shapes or not floating; an alpha or limit that is not constant.
"""

import torch

from coda_inductor import Pattern


def clamped_swiglu(gate, up, alpha: float, limit: float):
    gate = gate.clamp(max=limit)
    return (up.clamp(min=-limit, max=limit) + 1) * (gate * torch.sigmoid(gate * alpha))


PATTERN = Pattern(
    name="clamped_swiglu", meaning=clamped_swiglu, example={"alpha": 1.702, "limit": 7.0}
)
