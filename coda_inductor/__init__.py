# SPDX-License-Identifier: Apache-2.0
"""coda_inductor: GEMM-epilogue programs for unmodified PyTorch Transformers.

``model.compile(backend="coda")`` is all that is needed; importing this package is not.

Layer map (imports only point down; ``pyproject.toml`` has the contract)::

    cli           the commands of ``python -m coda_inductor``
    explanation   explain(): the backend's effect on a model, as a table and a page
    backend       the entry point
    torchtitan    its trainer's head and loss as one graph
    transformers, axolotl   a callback that compiles for Trainer and TRL; a plugin of axolotl's
    trl           TRL's head as operations of the graph
    pass_mode, op_by_op   the same under backend="inductor"; plain ops where Inductor fails
    tracing       a graph through the passes and AOTAutograd, without code generation
    notice, warm   warnings about a whole graph, once per process; reports of cached graphs
    falls         compiles the user's graph if ours does not compile
    joint, pipeline   the passes in order, and how they run on a graph
    dynamo        idioms, masks and losses on Dynamo's graph -> semantic ops
    rewrite       algebra on the aten graph: norms, losses, rotations, FP8
    memory        the tensors that are kept or computed again, within a limit
    lowering      the pass that fuses: regions become kernel calls
    record, sites, plan   notes of one compilation; what is known of each GEMM, and of all together
    fuse          GEMM + neighbours -> EpilogueProgram
    kernels       the door: all that is above knows of the kernels what this says
    tune, locks   measures sites; one process at a time
    processes     our own processes beside the user's
    runtime, debug   the custom op, compile workers, launches; debug folders
    select        is a site legal, with which config, and does it win?
    mainloop, report   programs in QuACK's kernels; reports of each GEMM
    codegen, patterns, table   program -> CuTeDSL source; pattern files and their proofs; tables
    matching, graph     matching on Dynamo's graph; reading and editing graphs
    optim         optimizers that update weights within the backward pass
    semantic, program   the ops that idioms become; epilogue programs and their meaning
    gpu, arch     GPU models and their generations
    options, refusal, remedies, log, cache_dir, compat, errors   leaf modules
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
    from coda_inductor.matching import Match, value
    from coda_inductor.pass_mode import disable, enable, enabled
    from coda_inductor.patterns import Pattern, load_patterns
    from coda_inductor.program import EpilogueProgram
    from coda_inductor.report import GraphReport, SiteReport, reports

__version__ = "0.2.0"

__all__ = [
    "CodaError", "EpilogueProgram", "ExplainError", "FallbackError", "GraphReport", "KernelError",
    "Match", "OptionError", "Pattern", "PatternError", "ProgramError", "SiteReport", "disable",
    "enable", "enabled", "explain", "load_patterns", "reports", "value",
]  # fmt: skip

_MODULES = {
    "explanation": ("explain",),
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
