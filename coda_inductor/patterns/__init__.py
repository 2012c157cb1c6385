# SPDX-License-Identifier: Apache-2.0
"""Pattern files: their content, their proof, and how they are found and loaded.

Each file imports only from those above it::

    conditions side conditions that several patterns share
    meaning    a plain torch function -> a semantic op with its gradient
    pattern    Pattern, the class that files define
    sides      both sides of a pattern's claims, as functions
    compare    the claims on drawn numbers, at each load
    formulas   a torch function -> its sympy expression
    exact      tensors of exact elements, on which any torch function runs
    equal      are two expressions the same? proven, refuted or neither
    prove      the claims, and their proof: for ``check`` and the tests
    loading    the places of pattern files; a file -> its patterns
"""

from coda_inductor.patterns.loading import builtin_folder, files, load, load_file, load_patterns
from coda_inductor.patterns.pattern import Condition, Pattern

__all__ = [
    "Condition", "Pattern", "builtin_folder", "files", "load", "load_file", "load_patterns",
]  # fmt: skip
