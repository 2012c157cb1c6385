# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights that torchao's ``quantize_`` put into FP8 become differentiable.

Before (a graph with gradients; W a ``Float8Tensor``, dynamic activations)::

    y = linear(x, W, b)

After::

    y = fp8_linear(x, W.qdata, W.scale, b)

Why: torchao's own product has no derivative, so that neither eager nor torch.compile can train
adapters on such weights ("derivative for aten::_scaled_mm is not implemented"). W stays as it is:
it is not cast in a step (``semantic.fp8``).

Leaves alone: graphs without gradients, where torchao's own chain stays, bit for bit; weights whose
activations are not quantized, because their layer is a product in 16 bits.

Refuses: blocks other than a row or the whole weight; bounds of the maxima; other dtypes than e4m3;
a weight that wants a gradient itself. torch then raises its own error: no gradient is lost.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import arguments, fake
from coda_inductor.graph.read import op_name
from coda_inductor.matching import bodies, forward_mode, replace
from coda_inductor.matching.hazards import differentiated
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.fp8 import fp8_linear


def differentiate_frozen(graph: Graph, record: Record) -> None:
    """Apply the rewrite to ``graph`` and its regions, in place. Each layer counts or is refused."""
    nodes = [node for body in bodies(graph) for node in body.graph.nodes]
    layers = list(filter(_is_frozen, nodes))
    # Under no_grad only parameters want a gradient.
    if not layers or not any(map(differentiated, nodes)):
        return
    dual = forward_mode(graph)
    for node in layers:
        call, weight = arguments(node), fake(arguments(node)["weight"])
        if (why := dual or _refusal(call, weight)) is not None:
            record.refuse("fp8_linear", node, why)
            continue
        put = Put(node)
        inner = [put(getattr, call["weight"], name) for name in ("qdata", "scale")]
        fast = bool(weight.mm_config.use_fast_accum)
        replace(node, put(fp8_linear, call["input"], *inner, call["bias"], fast))
        record.fire("fp8_linear")


def _is_frozen(node: Node) -> bool:
    """Is ``node`` a linear layer with torchao's FP8 weight and activations quantized to FP8?"""
    if op_name(node) != "linear":
        return False
    weight = fake(arguments(node)["weight"])
    ours = type(weight).__name__ == "Float8Tensor" and hasattr(weight, "qdata")
    return ours and getattr(weight, "act_quant_kwargs", None) is not None


def _refusal(call: dict[str, Any], weight: Any) -> Refusal | None:
    given, (n, k) = weight.act_quant_kwargs, weight.shape
    block, by = [*(weight.block_size or ())], type(given.granularity).__name__
    if (block, by) not in (([1, k], "PerRow"), ([n, k], "PerTensor")):
        text = f"its weight is scaled by blocks of {tuple(block)} and its input by {by}"
        return refuse("fp8-frozen", text)
    bounds = given.hp_value_lb, given.hp_value_ub
    e4m3 = {weight.qdata.dtype, given.float8_dtype} == {torch.float8_e4m3fn}
    if not e4m3 or bounds != (None, None):
        text = f"its weight is {weight.qdata.dtype} and its input {given.float8_dtype} in {bounds}"
        return refuse("fp8-frozen", text)
    if weight.requires_grad:
        return refuse("fp8-frozen", "its weight wants a gradient, which FP8 cannot hold")
    if not fake(call["input"]).dim():
        return refuse("fp8-frozen", "its input is a number")
    return None
