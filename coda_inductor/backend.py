# SPDX-License-Identifier: Apache-2.0
"""The entry point: ``torch.compile(model, backend="coda")``.

Reads like a table of contents: raise idioms on Dynamo's graph, then hand over to Inductor with our
joint pass, which rewrites, fuses and lowers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.fx import GraphModule

from coda_inductor import op_by_op, patterns
from coda_inductor.compat import compile_fx, inductor_config, without_saved_tensors_hooks
from coda_inductor.debug import Recorder
from coda_inductor.dynamo import attention, late_gradients
from coda_inductor.dynamo.idioms import raise_idioms
from coda_inductor.errors import FallbackError, OptionError
from coda_inductor.graph.snapshots import restore, snapshot
from coda_inductor.joint import JointPass
from coda_inductor.log import count, logger, warn_once
from coda_inductor.matching import bodies
from coda_inductor.options import Options, parse
from coda_inductor.runtime import launch, notice


def coda(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Args:
        gm: the torch-level graph that Dynamo captured.
        inputs: its example inputs, parameters included.
        mode: a mode of Inductor's, e.g. ``"max-autotune-no-cudagraphs"``.
        options: see :class:`coda_inductor.options.Options`; Inductor's own options pass through.
        name: names the graph in reports and debug folders.

    Raises:
        OptionError: unknown option or mode, or a value of the wrong type; no debug folder can be
            made.
        PatternError: a pattern file is missing, or with ``options={"strict": True}`` does not load.
        FallbackError: with ``options={"strict": True}``, where a fallback would happen.
    """
    settings = parse(mode, options)
    recorder = Recorder(name or "graph", settings.debug_dir if settings.debug else None)
    launch.forget_failures()
    notice.before_compile(gm, inputs, settings)
    around = raise_pass(gm, settings, recorder)
    user_pass = settings.inductor.get(
        "joint_custom_pre_pass", inductor_config.joint_custom_pre_pass
    )
    ours = JointPass(settings, recorder, user_pass)
    patches = {**settings.inductor, "joint_custom_pre_pass": ours}
    inner = op_by_op.compiler(name or "graph", strict=settings.strict, failed=lambda: ours.failed)
    compiled = compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)
    if not ours.ran:
        logger.info("%s: from torch's compile cache, neither counted nor reported", name or "graph")
    return around(cast(Callable[..., Any], compiled))


@without_saved_tensors_hooks()  # a user's would be given our fake tensors
def raise_pass(
    gm: GraphModule, settings: Options, recorder: Recorder, *, dry: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """All that happens on Dynamo's graph ``gm``, in place: idioms, attention, returned logits. One
    that fails leaves the graph as it was, with one warning; the others run. A ``dry`` run counts
    nothing.

    Returns what to wrap around the compiled graph (see ``late_gradients``).

    Raises:
        OptionError: ``disable`` names a pattern that is not loaded.
        PatternError: with ``strict``, when a pattern file does not load.
        FallbackError: with ``strict``, when a pattern fails.
    """
    known = patterns.load(settings.patterns, strict=settings.strict)
    names = {*(p.name for p in known), *attention.NAMES}
    if unknown := set(settings.disable) - names:
        raise OptionError(
            f"option 'disable': no pattern is called {', '.join(map(repr, sorted(unknown)))}; "
            f"known are {', '.join(sorted(names))}"
        )
    active = [p for p in known if p.name not in settings.disable]
    recorder.graph("0_before", gm)

    def idioms() -> None:
        refusals = raise_idioms(gm, active)
        recorder.report.near_misses += [f"{r.pattern} at {r.node}: {r.reason}" for r in refusals]

    def attend() -> None:
        fired, refused = attention.simplify_attention(gm, settings.disable)
        recorder.report.near_misses += refused
        for name, times in () if dry else fired.items():
            count(name, times)

    _alone("raising idioms", gm, settings, idioms)
    _alone("simplifying attention", gm, settings, attend)
    around = _alone("detaching logits", gm, settings, lambda: late_gradients.separate(gm))
    recorder.graph("1_raised", gm)
    return around or _nothing_around


def _alone(name: str, gm: GraphModule, settings: Options, run: Callable[[], Any]) -> Any:
    """What ``run`` returns. Where it fails, ``gm`` and its checkpointed regions become again what
    they were, with one warning, and the result is None."""
    kept = [(body.module, snapshot(body.graph)) for body in bodies(gm)]
    try:
        return run()
    except Exception as error:
        if settings.strict:
            raise FallbackError(f"{name} failed: {error}") from error
        warn_once(name, f"{type(error).__name__}: {error}")
        logger.debug("traceback", exc_info=True)
    for module, graph in kept:
        restore(module.graph, graph)
        module.recompile()
    return None


def _nothing_around(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled
