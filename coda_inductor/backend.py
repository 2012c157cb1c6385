# SPDX-License-Identifier: Apache-2.0
"""The entry point: ``torch.compile(model, backend="coda")``.

It reads the options, runs our passes on Dynamo's graph, and calls Inductor with those on aten's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.fx import GraphModule

from coda_inductor import falls, op_by_op, pass_mode, warm
from coda_inductor.compat import BackendCompilerFailed, compile_fx, lookup_backend, missing_names
from coda_inductor.errors import CodaError
from coda_inductor.joint import JointPass, begin
from coda_inductor.log import warn_once
from coda_inductor.lowering.lower import settle
from coda_inductor.memory.partition import Partitioner, usable
from coda_inductor.options import EVERYTHING, parse
from coda_inductor.record import Record


def coda(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph. Returns the compiled function.

    Args:
        gm: the torch-level graph that Dynamo captured.
        inputs: its example inputs, parameters included.
        mode: a mode of Inductor's, e.g. ``"max-autotune-no-cudagraphs"``.
        options: see :class:`coda_inductor.options.Options`; Inductor's own options pass through.
        name: names the graph in reports and debug folders.

    Raises:
        OptionError: unknown option or mode, a value of the wrong type, or a debug folder that
            cannot be created.
        PatternError: a pattern file is missing, or with ``options={"strict": True}`` does not load.
        FallbackError: with ``options={"strict": True}``, where a fallback would happen.
    """
    try:
        return _compiled(gm, inputs, mode, options, name or "graph")
    except CodaError as error:
        raise _for_dynamo(error).with_traceback(error.__traceback__) from None


def _for_dynamo(error: CodaError) -> Exception:
    """``error`` with its own type, in a form that Dynamo does not wrap. Dynamo wraps other errors,
    and adds advice for bugs of torch to the text."""
    kind, trace = type(error), error.__traceback__
    body = {
        "__module__": kind.__module__,
        "__str__": lambda _: str(error),
        "__reduce__": lambda _: error.__reduce__(),
    }
    subclass = type(kind.__name__, (BackendCompilerFailed, kind), body)
    return subclass(coda, error, trace and trace.tb_frame)


def _compiled(
    gm: GraphModule, inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any] | None,
    name: str,
) -> Callable[..., Any]:  # fmt: skip
    if missing := missing_names():
        warn_once("coda", f"it does nothing on this torch, which has no {', '.join(missing)}")
        return lookup_backend("inductor")(gm, inputs)  # with its own defaults
    settings = parse(mode, options)
    user_passes = pass_mode.beneath(settings.inductor)
    rounding = {"emulate_precision_casts": True} if settings.numerics == "eager" else {}
    patches = {**rounding, **settings.inductor, **user_passes}

    def with_us(changed: dict[str, None]) -> Callable[..., Any]:
        record = Record(settings, name, changed=changed)
        done = False
        inner = op_by_op.compiler(
            name,
            strict=settings.strict,
            falls=lambda: done or bool(falls.HELD & changed.keys()),
            failed=lambda: record.failed,
            settle=lambda graph: settle(graph, record),
        )
        joint = JointPass(record, user_passes[pass_mode.JOINT])
        config = {**patches, pass_mode.JOINT: joint}
        if usable() and user_passes.get(pass_mode.SPLIT, joint) is None:
            config[pass_mode.SPLIT] = Partitioner(lambda: record, joint.uuid)
        wrap = begin(gm, inputs, record)
        record.later = True
        key = warm.key(gm, inputs, joint.uuid, record)
        compiled = compile_fx(gm, inputs, inner_compile=inner, config_patches=config)
        done = True
        warm.finish(key, record)
        return wrap(cast(Callable[..., Any], compiled))

    def without_us() -> tuple[Any, bool]:
        whole = True

        def fall() -> bool:
            nonlocal whole
            whole = False
            return True

        inner = op_by_op.compiler(name, strict=settings.strict, falls=fall)
        compiled = compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)
        return compiled, whole

    if EVERYTHING in settings.disable:
        return without_us()[0]
    return falls.compiled(gm, settings, name, with_us, without_us)


class _Names(dict[str, Any]):
    """Torch's table of backends, in which ours may be registered twice. If two threads compile for
    the first time at the same time, both register it, and torch rejects the second registration."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) and self.get(str(name)) is not coda


_REGISTRY = lookup_backend.__globals__
if isinstance(_REGISTRY.get("_COMPILER_FNS"), dict):
    _REGISTRY["_COMPILER_FNS"] = _Names(_REGISTRY["_COMPILER_FNS"])
