# SPDX-License-Identifier: Apache-2.0
"""Norms between GEMMs are applied after the GEMMs that read them: RMSNorm by rules R1 to R4,
LayerNorm also by R5. Records (``semantic.norms``) hold their differences, also for user's norms.

defer      the pass: which norms wait, and why the others do not
modulated  vectors of a time step become a LayerNorm's weight and bias
uses       the readers of a norm: GEMMs, its gradient, weight gradients; the producer of its input
pivot      for a norm with a shift: a mean to subtract early, or its operand would round too much
forward    one norm's statistics, the operand of its GEMMs, and their row scale and shift
backward   the gradients of the norm and of the weights
"""
