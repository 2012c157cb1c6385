# SPDX-License-Identifier: Apache-2.0
"""The gradient of a loss around an LM head (R7).

logit_gradients  the ops between the gradients of a loss's logits and of the head's logits
rounded          the pass: logits that are scaled in float32 are kept in 16 bits
slices           the pass: the gradient is computed and used one slice at a time
unstored         the pass: without a gradient, the logits need not be in memory
"""
