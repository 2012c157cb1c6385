# SPDX-License-Identifier: Apache-2.0
"""Norms around GEMMs: RMSNorm by R1 to R4, LayerNorm by R5."""
