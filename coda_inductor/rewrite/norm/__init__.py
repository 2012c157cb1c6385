# SPDX-License-Identifier: Apache-2.0
"""Norms between GEMMs are applied after the GEMMs that read them: RMSNorm by rules R1 to R4, and
users' norms. Records (``semantic.norms``) hold their differences.

defer     the pass: which norms wait, and why the others do not
uses      the readers of a norm: GEMMs, its gradient, weight gradients; the producer of its input
forward   one norm's statistics, the operand of its GEMMs, and their row scale
backward  the gradients of the norm and of the weights
"""
