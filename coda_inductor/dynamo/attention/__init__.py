# SPDX-License-Identifier: Apache-2.0
"""``scaled_dot_product_attention`` in Dynamo's graph, before SDPA has chosen its kernel.

constants     the values of constant tensors, if sizes are numbers
calls         masks become flags, repeated heads become grouped ones
blocks        a mask's blocks, and the call of FlexAttention that uses them
block_masks   which calls use the blocks
"""

from coda_inductor.dynamo.attention.block_masks import NAME as BLOCK_MASK
from coda_inductor.dynamo.attention.block_masks import skip_blocks
from coda_inductor.dynamo.attention.calls import NAMES, simplify_attention

__all__ = ["BLOCK_MASK", "NAMES", "simplify_attention", "skip_blocks"]
