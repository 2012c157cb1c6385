"""Algebra on semantic ops in the aten graph, one file a rule family.

norms   RMSNorm's row scale moves past the GEMMs behind it (R1, R2)
"""

from coda_inductor.rewrite.norms import defer_norms

__all__ = ["defer_norms"]
