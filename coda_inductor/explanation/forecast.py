# SPDX-License-Identifier: Apache-2.0
"""How long a call or step is expected to take on a GPU: a roofline of its graphs.

Products take the time that the gate expects; for fused products the site's additional time,
measured or expected, is added. Attention multiplies at a fraction of cuBLAS's rate. The rest are
elementwise kernels, one for all ops that depend on the same products; each reads and writes its
tensors once. An op whose result only later kernels read is computed in the first of them.

The constants are an H200's (``benchmarks/results/h200_account*.json``). Those for products and
masks were fitted to measured steps. The host, an optimizer and hidden blocks are not included.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from coda_inductor.gpu import Gpu
from coda_inductor.graph.gemms import TRACED, gemm_inputs
from coda_inductor.graph.nodes import arguments, aten, bytes_of, fake, may_view
from coda_inductor.graph.sizes import hint
from coda_inductor.graph.walk import base, readers
from coda_inductor.kernels import product_us
from coda_inductor.program.dtypes import HALF
from coda_inductor.report import SiteReport

#: The largest error of a forecast, among the measured steps of ``test_forecast.py``.
ERROR = 0.16
#: Time of products in many consecutive steps, with a hot GPU, relative to each measured alone.
_BUSY = 1.08
#: The part of cuBLAS's rate that attention reaches, with heads of 64 columns and of more.
_NARROW, _WIDE = 0.5, 0.62
#: Work of its gradients relative to the forward, and its time with a mask relative to none.
_BACKWARD, _MASKED = 2.5, 1.62
#: Read as many bytes as they write, of a tensor of any size.
_LOOKUPS = ("embedding", "gather", "index", "scatter")
_LOSS = "linear_cross_entropy_backward"
_ATTENTION = ("dot_product", "flex_attention")
#: No elementwise work: kernels of their own.
_KERNELS = (*_ATTENTION, "gemm_epilogue", "bmm", "grouped", "convolution", _LOSS)


def forecast(
    stock: Sequence[Graph], traced: Sequence[Graph], sites: Sequence[SiteReport], gpu: Gpu
) -> tuple[float, float] | None:
    """(stock, traced): expected microseconds of the graphs without our passes and with them;
    ``sites`` reports the latter. None if the host is the limit, and for models that were not
    compared with a measured step: other dtypes than 16-bit ones, experts, encoders (up to 2x as
    long)."""
    gemms = [node for graph in stock for node in graph.nodes if node.target in TRACED]
    attention = [n for g in (*stock, *traced) for n in g.nodes if _named(n, _ATTENTION)]
    if not gpu.rated or any(fake(gemm_inputs(n)[0]).dtype not in HALF for n in gemms):
        return None
    if any(_named(node, ("grouped",)) for graph in stock for node in graph.nodes):
        return None
    if not all(_mask(n) or arguments(n).get("is_causal") for n in attention) or any(
        site.refusal is not None and site.refusal.code == "too-small" for site in sites
    ):
        return None
    products = _BUSY * sum(_product_us(node, gpu) for node in gemms)
    added = _BUSY * sum(site.estimate.added_us for site in sites if site.fused and site.estimate)
    before, after = (sum(_others_us(graph, gpu) for graph in graphs) for graphs in (stock, traced))
    return products + before, products + added + after


def _product_us(gemm: Node, gpu: Gpu) -> float:
    a, (*batch, m, n) = fake(gemm_inputs(gemm)[0]), map(hint, fake(gemm).shape)
    return product_us(math.prod(batch) * m, n, hint(a.shape[-1]), gpu)


def _others_us(graph: Graph, gpu: Gpu) -> float:
    """Expected microseconds of everything except products."""
    waits: dict[Node, int] = {}  # for how many kernels, one after the other
    traffic: defaultdict[int, dict[tuple[Node, bool], int]] = defaultdict(dict)
    inlined: set[Node] = set()
    us = 0.0
    for node in graph.nodes:
        waits[node] = max((waits[n] + _apart(n) for n in node.all_input_nodes), default=0)
    for node in reversed(graph.nodes):  # Inductor computes an elementwise op where it is read
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            later = readers(node, may_view)[1]
            if not any(_apart(n) or n.op == "output" for n in later):
                waits[node] = min((waits[n] for n in later), default=waits[node])
                if len(node.all_input_nodes) == 1 and not waits[node]:
                    inlined.add(node)  # recomputed by each kernel that reads it
    for node in graph.nodes:
        if _apart(node):
            us += _alone_us(node, gpu)
        elif node.op == "call_function" and node.all_input_nodes and not may_view(node):
            kernel = traffic[waits[node]]
            for read in node.all_input_nodes:
                near = base(read, may_view)
                maker = base(near, lambda n: may_view(n) or n in inlined)
                tensor = read if maker is near else maker
                if maker.op == "placeholder" or waits[maker] < waits[node] or _apart(maker):
                    size = _read(node, tensor)
                    kernel[maker, False] = max(kernel.get((maker, False), 0), size)
            if node not in inlined and any(
                waits[n] != waits[node] or _apart(n) or n.op == "output"
                for n in readers(node, may_view)[1]
            ):
                kernel[node, True] = bytes_of(node)
    return us + sum(sum(k.values()) / gpu.bytes_per_us + gpu.launch_us for k in traffic.values())


def _read(node: Node, read: Node) -> int:
    """The number of bytes of the tensor ``read`` that ``node`` reads."""
    most = [bytes_of(node)] * _named(node, _LOOKUPS)
    return min(bytes_of(read), bytes_of(base(read, may_view)) or bytes_of(read), *most)


def _apart(node: Node) -> bool:
    return node.target in TRACED or _named(node, _KERNELS)


def _named(node: Node, words: Sequence[str]) -> bool:
    return node.op == "call_function" and any(word in str(node.target) for word in words)


def _alone_us(node: Node, gpu: Gpu) -> float:
    """Expected microseconds of a node that is a kernel of its own and no product of ``TRACED``."""
    if _named(node, _ATTENTION):
        return _attention_us(node, gpu)
    if _LOSS in str(node.target):  # logits are read, their gradient is written and read
        return 3 * bytes_of(arguments(node)["logits"]) / gpu.bytes_per_us
    return _product_us(node, gpu) if node.target is aten.bmm.default else 0.0


def masked(graphs: Sequence[Graph]) -> bool:
    """Does any attention call read a mask?"""
    return any(_mask(n) for g in graphs for n in g.nodes if _named(n, _ATTENTION))


def _mask(node: Node) -> bool:
    args = {} if "flex" in str(node.target) else arguments(node)
    return not args or any(args.get(name) is not None for name in ("attn_mask", "attn_bias"))


def _attention_us(node: Node, gpu: Gpu) -> float:
    backward, args = "backward" in str(node.target), arguments(node)
    q, k = (args[name] for name in (("query", "key") if "query" in args else ("input", "index")))
    *batch, rows, width = map(hint, fake(q).shape)
    work = 4.0 * math.prod(batch) * rows * hint(fake(k).shape[-2]) * width
    work *= (_BACKWARD if backward else 1) * (_MASKED if _mask(node) else 0.5)  # half of it causal
    traffic = bytes_of(*node.all_input_nodes) + bytes_of(q) * (3 if backward else 1)
    rate = gpu.flops_per_us * (_NARROW if width <= 64 else _WIDE)
    return work / rate + traffic / gpu.bytes_per_us
