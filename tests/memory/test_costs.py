# SPDX-License-Identifier: Apache-2.0
"""What our ops cost, for torch's FLOP counter and for the planner."""

import functools

import torch
import torch.nn.functional as F
from harness import Harness
from programs import parsed
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from coda_inductor.gpu import H100
from coda_inductor.memory import costs
from coda_inductor.runtime.op import gemm_epilogue

SCALED = parsed("bfloat16", "r:row", "y mul acc r", "y")
PAIR = parsed("bfloat16", "", "y mul acc0 acc1", "y", accs=("acc0", "acc1"))
X, W, R = (torch.randn(*size).bfloat16() for size in ((24, 16), (16, 40), (40,)))
PRODUCT = 2 * 24 * 16 * 40
CONFIG = "128x128:2x1:pp"


def counted(function, *args):
    costs.install()
    with FlopCounterMode(display=False) as mode:
        function(*args)
    return mode.get_total_flops()


def test_a_fused_gemm_counts_as_its_product():
    fused = counted(lambda: gemm_epilogue([X], [W], [R], SCALED, CONFIG))
    assert fused == counted(lambda: X @ W) == PRODUCT


def test_sums_and_pairs_count_each_product():
    assert counted(lambda: gemm_epilogue([X], [W, W], [], PAIR, CONFIG)) == 2 * PRODUCT
    assert counted(lambda: gemm_epilogue([X, X], [W, W], [R], SCALED, CONFIG)) == 2 * PRODUCT


def graph_of(function, *args):
    harness = Harness(gate="always", reference=False)
    harness.run(function, *args)
    return harness.graph


def test_attention_costs_half_where_it_is_causal():
    q = torch.randn(1, 4, 64, 32)
    found = {}
    for causal in (False, True):
        graph = graph_of(
            functools.partial(F.scaled_dot_product_attention, is_causal=causal), q, q, q
        )
        (node,) = [n for n in graph.nodes if "attention" in str(n.target)]
        found[causal] = costs.flops(node)
    assert found[False] == 2 * found[True] == 4 * q.numel() * 64


def test_flex_attention_costs_what_attention_costs():
    """A regression: under the option ``memory`` a graph with masks (ModernBERT) fell back."""
    q = torch.randn(1, 2, 128, 16)
    graph = graph_of(lambda q: flex_attention(q, q, q), q)
    (node,) = [n for n in graph.nodes if "flex_attention" in str(n.target)]
    assert costs.flops(node) == 4 * q.numel() * 128
    assert costs.milliseconds(node, H100) > 0


def test_a_product_takes_longer_than_moving_its_bytes():
    x, w = torch.randn(4096, 4096, device="meta"), torch.randn(4096, 4096, device="meta")
    graph = graph_of(lambda x, w: x @ w, x, w)
    (node,) = [n for n in graph.nodes if "mm" in str(n.target)]
    alone = 2 * 4096**3 / H100.flops_per_us / 1000
    assert alone < costs.milliseconds(node, H100) < 1.25 * alone
