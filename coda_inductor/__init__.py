# SPDX-License-Identifier: Apache-2.0
"""coda_inductor: GEMM-epilogue programs for unmodified PyTorch Transformers.

``torch.compile(model, backend="coda")`` is all that is needed; importing this package is not.

Layer map (imports only point down)::

    cli        the commands of ``python -m coda_inductor``
    explanation   explain(): what the backend does with a model, as a table and a page
    backend    the entry point and the passes in order
    pass_mode  enable(): the same passes under backend="inductor"
    attention  masks that are known, heads that are repeated (Dynamo graph)
    late_gradients   returned logits get no made-up gradient (Dynamo graph)
    raising    idioms -> semantic ops (Dynamo graph)
    tracing    a graph through our passes without code generation
    rewrite    algebra on semantic ops (aten graph)
    fuse       GEMM + neighbours -> EpilogueProgram (aten graph)
    debug, report   what happened, for people
    runtime    the custom op, kernel configs, gate, caches
    kernels, render   program -> CuTeDSL source -> kernel
    matching, patterns, semantic   what passes match on
    sides      forward or backward: the two sides of a joint graph
    reference, program   what a program is and means
    options, errors, log, cache_dir, cache_contents   leaves
"""

from typing import TYPE_CHECKING, Any

from coda_inductor.errors import (
    CodaError,
    ExplainError,
    FallbackError,
    KernelError,
    OptionError,
    PatternError,
    ProgramError,
)
from coda_inductor.explanation import explain
from coda_inductor.matching import Match, value
from coda_inductor.patterns import Pattern, load_patterns
from coda_inductor.program import EpilogueProgram
from coda_inductor.report import GraphReport, SiteReport, reports

if TYPE_CHECKING:
    from coda_inductor.pass_mode import disable, enable, enabled

__version__ = "0.2.0"

__all__ = [
    "CodaError", "EpilogueProgram", "ExplainError", "FallbackError", "GraphReport", "KernelError",
    "Match", "OptionError", "Pattern", "PatternError", "ProgramError", "SiteReport", "disable",
    "enable", "enabled", "explain", "load_patterns", "reports", "value",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What needs Inductor, which takes a second to import, is imported when it is asked for."""
    if name not in ("disable", "enable", "enabled"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from coda_inductor import pass_mode

    return getattr(pass_mode, name)
