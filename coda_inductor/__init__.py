# SPDX-License-Identifier: Apache-2.0
"""coda_inductor: GEMM-epilogue programs for unmodified PyTorch Transformers.

``torch.compile(model, backend="coda")`` is all that is needed; importing this package is not.

docs/architecture.md has the map of the layers; imports only point down.
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
