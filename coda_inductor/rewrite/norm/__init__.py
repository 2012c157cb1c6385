# SPDX-License-Identifier: Apache-2.0
"""Norms between GEMMs wait until after the GEMMs that read them: RMSNorm by rules R1 to R4,
LayerNorm by R5 as well. What one norm does and another does not stands in their records
(``semantic.norms``), also for a norm of a user's pattern file.

defer      the pass: which norms wait, and why the others do not
modulated  vectors of a time step become a LayerNorm's weight and bias
uses       the readers of a norm: GEMMs, its gradient, gradients of weights; the maker of its input
pivot      for a norm with a shift: the mean at hand without which its operand would round too much
forward    one norm: its statistics, the operand of the GEMMs, the GEMMs: row scale and shift
backward   its gradients and the weights'
"""
