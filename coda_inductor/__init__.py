# SPDX-License-Identifier: Apache-2.0
"""coda_inductor: GEMM-epilogue programs for unmodified PyTorch Transformers.

``model.compile(backend="coda")`` is all that is needed; importing this package is not.

Rooms, from the top down; imports only point down (``pyproject.toml`` has the contract), and
``docs/architecture.md`` says what each is for::

    cli; explanation, axolotl; backend, torchtitan, transformers; trl; lm_head
    pass_mode, op_by_op; tracing; falls, joint; notice, warm; pipeline; memory
    dynamo, rewrite, lowering; record; sites; plan; fuse; kernels; tune; runtime, debug; select
    mainloop, report; codegen, patterns, table; matching; graph; optim; semantic
    gpu, program, options, locks; arch; refusal; remedies; log, cache_dir, processes
    compat; errors
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from coda_inductor.lm_head import token_log_probs
    from coda_inductor.matching import Match, value
    from coda_inductor.pass_mode import disable, enable, enabled
    from coda_inductor.patterns import Pattern, load_patterns
    from coda_inductor.program import EpilogueProgram
    from coda_inductor.report import GraphReport, SiteReport, reports

__version__ = "0.2.0"

__all__ = [
    "CodaError", "EpilogueProgram", "ExplainError", "FallbackError", "GraphReport", "KernelError",
    "Match", "OptionError", "Pattern", "PatternError", "ProgramError", "SiteReport", "disable",
    "enable", "enabled", "explain", "load_patterns", "reports", "token_log_probs", "value",
]  # fmt: skip

_MODULES = {
    "explanation": ("explain",),
    "lm_head": ("token_log_probs",),
    "matching": ("Match", "value"),
    "pass_mode": ("disable", "enable", "enabled"),
    "patterns": ("Pattern", "load_patterns"),
    "program": ("EpilogueProgram",),
    "report": ("GraphReport", "SiteReport", "reports"),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
}


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted((*__all__, "__version__"))


def __getattr__(name: str) -> Any:
    """Import public names on first use: a process that compiles kernels needs none of them, and
    importing Inductor and Dynamo takes seconds."""
    if name in _MODULES:
        return importlib.import_module(f"coda_inductor.{name}")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"coda_inductor.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
