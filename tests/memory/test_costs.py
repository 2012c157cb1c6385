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


def counted(*args):
    costs.install()
    with FlopCounterMode(display=False) as mode:
        gemm_epilogue(*args, "128x128:2x1:pp")
    return mode.get_total_flops()


def test_a_fused_gemm_counts_each_of_its_products():
    product = 2 * 24 * 16 * 40
    assert counted([X], [W], [R], SCALED) == product
    assert counted([X], [W, W], [], PAIR) == 2 * product
    assert counted([X, X], [W, W], [R], SCALED) == 2 * product


def attention_of(function):
    """The node of attention in the graph of ``function`` of queries, keys and values."""
    harness, q = Harness(gate="always", reference=False), torch.randn(1, 4, 128, 32)
    harness.run(function, q, q, q)
    (node,) = [n for n in harness.graph.nodes if "attention" in str(n.target)]
    return node


def test_attention_costs_half_where_it_is_causal():
    """A regression: under the option ``memory`` a graph with flex_attention fell back."""
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    every = 4 * 4 * 128 * 32 * 128
    assert costs.flops(attention_of(F.scaled_dot_product_attention)) == every
    assert costs.flops(attention_of(causal)) == every / 2
    flex = attention_of(flex_attention)
    assert costs.flops(flex) == every
    assert costs.milliseconds(flex, H100) > 0
