# SPDX-License-Identifier: Apache-2.0
"""Which implementation of attention a graph calls: torch chose it when the graph was traced, by
its own order for the device, dtype and shape. Math attention is plain ops by then, and not seen.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import Graph, Node

#: Part of an op's name -> what people call it; the first that matches.
_IMPLEMENTATIONS = {
    "flex_attention": "FlexAttention",
    "cudnn_attention": "cuDNN",
    "flash_attention": "FlashAttention",
    "efficient_attention": "memory-efficient",
    "fused_attention": "the device's own",
    "scaled_dot_product": "SDPA",
}


def implementation(node: Node) -> str | None:
    """``"cuDNN"``, say, of a call of attention, forward or backward; None of any other node."""
    if node.op != "call_function":
        return None
    name = str(node.target)
    return next((text for part, text in _IMPLEMENTATIONS.items() if part in name), None)


def calls(graph: Graph) -> Counter[str]:
    """How often each implementation is called in the forward pass."""
    forward = (node for node in graph.nodes if "backward" not in str(node.target))
    return Counter(text for node in forward if (text := implementation(node)) is not None)
