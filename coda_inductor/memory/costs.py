# SPDX-License-Identifier: Apache-2.0
"""Costs of ops: FLOP for ``torch.utils.flop_counter``, milliseconds for the planner.

A fused GEMM counts the FLOP of its products and nothing for its epilogue, as torch counts ``mm``
and nothing for elementwise ops. So model FLOP utilization is the same with and without us, and the
prices of ``torch._functorch.partitioners`` see a fused GEMM as its products.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, register_flop_formula

from coda_inductor.compat import tree_map
from coda_inductor.gpu import Gpu
from coda_inductor.graph.nodes import bytes_of, fake
from coda_inductor.graph.read import read
from coda_inductor.graph.sizes import hint
from coda_inductor.kernels import HEAD_GRADIENTS, OP
from coda_inductor.semantic import dropout
from coda_inductor.semantic.experts import WGRAD
from coda_inductor.semantic.loss import SLICE_BYTES

#: Share of a single product's rate that a step sustains at the power limit (H200, Llama of
#: 8B widths: recomputing 9.6 ms by the rate of single products took 10.6, 19.5 took 23.6).
_SUSTAINED = 0.85
#: Attention reaches this share of the rate of large products (FlashAttention 2 on an H100).
_ATTENTION = 0.55


@functools.cache
def install() -> None:
    """Register FLOP formulas of our ops with torch, once for this process."""
    for op, formula in _FORMULAS.items():
        if op.overloadpacket not in flop_registry:
            register_flop_formula(op.overloadpacket)(formula)


def _gemm_epilogue(as_, bs, *_: Any, **__: Any) -> int:
    """FLOP of ``coda_inductor::gemm_epilogue`` from shapes: as_[j] (M, K_j), bs[j] (K_j, N) or
    (E, K_j, N), one A for both halves of a pair, one B for all rows of an expert."""
    terms = max(len(as_), len(bs))
    pairs = zip([*as_] * (terms // len(as_)), [*bs] * (terms // len(bs)), strict=True)
    return sum(2 * a[-2] * a[-1] * b[-1] for a, b in pairs)


def _head_gradients(_dloss, logits, *others: Any, **__: Any) -> int:
    """FLOP of the gradients of an LM head: logits (..., V), weight (V, K) and x (M, K), each None
    if its gradient is not needed."""
    matrices = [shape for shape in others[3:5] if shape is not None]
    return sum(2 * math.prod(logits) * shape[1] for shape in matrices)


#: FLOP of our ops from shapes.
_FORMULAS: dict[Any, Callable[..., int]] = {
    OP: _gemm_epilogue,
    HEAD_GRADIENTS: _head_gradients,
    # The weight gradients of experts: a (M, K), bs[j] (M, N_j).
    WGRAD: lambda a, _rows, bs, *_, **__: sum(2 * b[0] * a[-1] * b[1] for b in bs),
    # One x (..., K) times all weights (N, K); the gradients of x and of the weights, if needed.
    dropout.FORWARD: lambda x, w, *_, **__: 2 * math.prod(x) * w[0],
    dropout.BACKWARD: lambda _, x, w, *more, **__: sum(more[4]) * 2 * math.prod(x) * w[0],
}


def workspace(node: Node) -> int:
    """Bytes that the kernel of ``node`` needs beside its inputs and results."""
    if node.target is HEAD_GRADIENTS:
        # A slice, and the sum over slices in float32, before dx itself.
        return min(SLICE_BYTES, bytes_of(node.all_input_nodes[1])) + bytes_of(fake(node)[0])
    if "attention_backward" in str(node.target):  # the gradient of queries in float32
        return 2 * bytes_of(node.all_input_nodes[1])
    return 0


def flops(node: Node) -> int:
    """FLOP of one call, by torch's formulas and ours; 0 if there is no formula."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if "attention" in str(packet) and "backward" not in str(packet):
        return _attention(node)
    if packet not in flop_registry:
        return 0
    formula = flop_registry[packet]
    args, kwargs = tree_map(_meta, map_arg((node.args, node.kwargs), fake))
    return int(formula(*args, **kwargs, out_val=tree_map(_meta, fake(node))))


def _attention(node: Node) -> int:
    """FLOP of attention, half of it if causal. torch's formula does not know groups of heads."""
    call = read(node)
    args = {} if call is None else call.args
    if "query" not in args:  # flex attention's have no names
        args = dict(zip(("query", "key"), node.args, strict=False))
    scores = hint(fake(args["query"]).numel()) * hint(fake(args["key"]).shape[-2])
    return (2 if args.get("is_causal") else 4) * scores


def _meta(value: Any) -> Any:
    """``value`` as a meta tensor with hints as sizes: formulas compare and multiply sizes."""
    if isinstance(value, torch.SymInt):
        return hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty([hint(s) for s in value.shape], dtype=value.dtype, device="meta")


def milliseconds(node: Node, gpu: Gpu) -> float:
    """Expected time of ``node`` as a kernel: to compute, or to move its bytes if that is longer."""
    traffic = bytes_of(node, *node.all_input_nodes)
    us = gpu.launch_us + traffic / gpu.bytes_per_us
    rate = _SUSTAINED * gpu.flops_per_us * (_ATTENTION if "attention" in str(node.target) else 1.0)
    return max(us, flops(node) / rate) / 1000
