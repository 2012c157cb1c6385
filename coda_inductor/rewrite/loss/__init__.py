# SPDX-License-Identifier: Apache-2.0
"""The gradient of a loss around an LM head (R7)."""
