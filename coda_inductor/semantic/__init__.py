# SPDX-License-Identifier: Apache-2.0
"""The semantic vocabulary: what many spellings of an idiom are raised to.

Each op is defined once, by a plain torch function (``define``); what is elementwise, as SwiGLU, by
the meaning of a pattern file. The op is what passes match on;
what stays unfused is traced through that function again, so that Inductor sees plain aten. Ops that
differentiate have a backward op of the same kind, so that the joint graph still says what it means;
its flags say which gradients are wanted, so that frozen weights need no patterns of their own.
"""

from coda_inductor.semantic.loss import cross_entropy
from coda_inductor.semantic.norms import layer_norm, rms_norm
from coda_inductor.semantic.rotary import rotate, rotate_pairs

__all__ = ["cross_entropy", "layer_norm", "rms_norm", "rotate", "rotate_pairs"]
