# SPDX-License-Identifier: Apache-2.0
"""Around ``scaled_dot_product_attention`` in Dynamo's graph, where SDPA has not chosen its kernel.

index_values  elements of a tensor as expressions in their indices
index_calls   how a node is called
index_proof   what a tensor is made of, for every size
constants     what a tensor's values are, where sizes are numbers
calls         masks become flags, repeated heads become grouped ones
"""

from coda_inductor.dynamo.attention.calls import NAMES, simplify_attention

__all__ = ["NAMES", "simplify_attention"]
