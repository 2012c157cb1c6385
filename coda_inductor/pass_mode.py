# SPDX-License-Identifier: Apache-2.0
"""The same passes under ``backend="inductor"``, for programs that accept no other backend.

:func:`enable` puts them into Inductor's own configuration: ``pre_grad_custom_pass`` gets Dynamo's
graph and ``joint_custom_pre_pass`` the aten graph, after the user's passes in the same setting. In
torch 2.13 and newer that configuration belongs to the thread; both passes run in the thread that
compiles, before forward and backward passes are split, so that it does not matter where the
backward pass is compiled.

The backend runs around Inductor and not inside it. Therefore it differs in this:

- here logits that are returned with a loss get a gradient of zeros if the user computes none (the
  backend avoids that: ``dynamo/late_gradients.py`` wraps the compiled graph);
- here a graph that Inductor cannot compile without our passes either is an error, as without us,
  and does not run op by op (``op_by_op.py``);
- here kernels compile while the joint graph is rewritten, not in parallel with Inductor's work;
- AOTInductor, which knows no other backend, compiles without our passes;
- here a ``pre_grad_custom_pass`` or ``joint_custom_pre_pass`` of torch.compile's replaces ours.
"""

import dataclasses
import functools
import inspect
import itertools
import threading
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.fx import Graph, GraphModule

from coda_inductor import compat, falls, warm
from coda_inductor.compat import inductor_compile, inductor_config, missing_names
from coda_inductor.errors import OptionError
from coda_inductor.joint import HookPass, begin, rewrite
from coda_inductor.log import say_once, warn_once
from coda_inductor.matching import value
from coda_inductor.memory.partition import Partitioner, installed, usable
from coda_inductor.options import EVERYTHING, Options, parse
from coda_inductor.pipeline import check_names
from coda_inductor.record import Record
from coda_inductor.refusal import refuse

DYNAMO, JOINT = "pre_grad_custom_pass", "joint_custom_pre_pass"
#: Inductor's setting for the split into forward and backward pass.
SPLIT = "custom_partitioner_fn"


class _Compiling(threading.local):
    """The latest compilation of this thread: its record and its torch context."""

    record: Record | None = None
    context: weakref.ref[Any] | None = None
    inside: bool = False  #: of our ``compile_fx``

    def begin(self, options: Options) -> Record:
        """Start a compilation. Returns its record."""
        context = compat.TracingContext.try_get()
        self.context = None if context is None else weakref.ref(context)
        self.record = Record(options, wraps=False)
        return self.record

    def now(self, options: Options) -> Record | None:
        """The record of the current compilation, if it began with these options; else None."""
        context = None if self.context is None else self.context()
        if self.record is None or compat.TracingContext.try_get() is not context:
            return None
        return self.record if self.record.options == options else None


_compiling = _Compiling()


class _EnabledPass(HookPass):
    """One of the two passes of this mode."""

    def current(self) -> Record | None:
        return _compiling.now(self.options)


class _DynamoPass(_EnabledPass):
    """The passes of ``pipeline.ON_DYNAMO``, and the start of a compilation."""

    def run(self, graph: Graph) -> None:
        gm = graph.owning_module
        if not isinstance(gm, GraphModule) or _is_nested():
            return  # checkpointed regions are handled with the graph around them
        record = _compiling.begin(self.options)
        inputs = [value(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")]
        begin(gm, inputs, record)


class _JointPass(_EnabledPass):
    """The passes of ``pipeline.ON_ATEN``."""

    def run(self, graph: Graph) -> None:
        options = self.options  # without a record Inductor ran no pass on Dynamo's graph
        record = _compiling.now(options) or _compiling.begin(options)
        rewrite(graph, record, plans=installed())

    def uuid(self) -> Any:
        """As for every pass; None (do not cache) after a failure that the next process may not
        have. Inductor asks again before it caches a result."""
        record = self.current()
        return None if record is not None and record.failed else super().uuid()


def enable(**options: Any) -> None:
    """Let ``torch.compile(model)``, with its default ``backend="inductor"``, run our passes in this
    thread. Call it in the thread that compiles. A second call replaces the options.

    Args:
        options: this package's options, as for ``torch.compile(..., backend="coda",
            options={...})``, e.g. ``gate="always"``; pass Inductor's to torch.compile.

    Raises:
        OptionError: an unknown option, a wrong value, or an option of Inductor's.
        PatternError: a pattern path does not exist; with ``strict``, a file does not load.
    """
    for name, hook in _passes(options).items():
        setattr(inductor_config, name, hook)


def disable() -> None:
    """Restore the settings before :func:`enable`. A pass that was set since then stays."""
    for name, user_passes in beneath({}).items():
        setattr(inductor_config, name, user_passes)
    wrapped: Any = getattr(inductor_compile, "compile_fx", None)
    if getattr(wrapped, "coda", False):  # else somebody has wrapped it again
        inductor_compile.compile_fx = wrapped.__wrapped__


@contextmanager
def enabled(**options: Any) -> Iterator[None]:
    """:func:`enable` inside a ``with`` block: afterwards both settings are restored, also after an
    exception. Graphs compiled inside keep their options, also when compiled again later."""
    with inductor_config.patch(_passes(options)):
        yield


def beneath(options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's passes of both settings, and the user's partitioner, without ours: from
    torch.compile's ``options``, else from Inductor's configuration."""
    names = [name for name in (DYNAMO, JOINT, SPLIT) if hasattr(inductor_config, name)]
    return {name: _without(options.get(name, getattr(inductor_config, name))) for name in names}


def _without(passes: Any) -> Any:
    if isinstance(passes, Partitioner):
        return None
    if isinstance(passes, _EnabledPass):
        return passes.setting
    if isinstance(passes, (list, tuple)) and any(isinstance(p, _EnabledPass) for p in passes):
        # The user has put ours into a list.
        items = (p.user_passes if isinstance(p, _EnabledPass) else (p,) for p in passes)
        return type(passes)(itertools.chain(*items))
    return passes


def _passes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Both settings with our passes; empty if this torch lacks a name that we need."""
    settings = parse(None, options)
    if settings.inductor:
        raise OptionError(
            f"option {next(iter(settings.inductor))!r} is Inductor's: pass it to torch.compile, or "
            "set it in torch._inductor.config"
        )
    if EVERYTHING in settings.disable:
        return {}
    check_names(Record(dataclasses.replace(settings, debug=False)))
    if settings.numerics == "eager" and not inductor_config.emulate_precision_casts:
        say_once(
            "option 'numerics': set torch._inductor.config.emulate_precision_casts = True too, or "
            "Inductor's own kernels round elsewhere"
        )
    user_passes = beneath({})
    missing = missing_names() or [
        f"torch._inductor.config.{n}" for n in (DYNAMO, JOINT) if n not in user_passes
    ]
    if missing:
        warn_once("coda", f"it does nothing on this torch, which has no {', '.join(missing)}")
        return {}
    _wrap_compile_fx()
    joint = _JointPass(settings, user_passes[JOINT])
    hooks = {DYNAMO: _DynamoPass(settings, user_passes[DYNAMO]), JOINT: joint}
    if usable() and user_passes.get(SPLIT, hooks) is None:
        hooks[SPLIT] = Partitioner(lambda: _compiling.now(joint.options), joint.uuid)
    return hooks


def _wrap_compile_fx() -> None:
    """Put ``falls.py`` around Inductor's ``compile_fx``, once per process. No setting can do this,
    because hooks see a graph only before it fails. Without our passes nothing changes."""
    inductor = getattr(inductor_compile, "compile_fx", None)
    if inductor is None or getattr(inductor, "coda", False):
        return

    @functools.wraps(inductor)
    def compile_fx(gm: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        patches = kwargs.get("config_patches") or {}
        plain = {**kwargs, "config_patches": {**patches, **beneath(patches)}}
        our_pass = _our_pass(patches)
        if our_pass is not None and getattr(compat.virtualized, "aot_compilation", False):
            why = refuse("aot-inductor", "they run without Python, which launches our kernels")
            warn_once("AOTInductor's programs", f"{why.text}. {why.remedy.text}")
            return inductor(gm, inputs, *args, **plain)
        if our_pass is None or _compiling.inside or not isinstance(gm, GraphModule):
            return inductor(gm, inputs, *args, **kwargs)

        def with_us(changed: dict[str, None]) -> Any:
            cached = _compiling.begin(our_pass.options)  # if none of our passes runs
            key = warm.key(gm, inputs, our_pass.uuid, cached)
            try:
                compiled = inductor(gm, inputs, *args, **kwargs)
                warm.finish(key, _compiling.record or cached)
                return compiled
            finally:
                changed.update(getattr(_compiling.record, "changed", {}))

        def without_us() -> tuple[Any, bool]:
            return inductor(gm, inputs, *args, **plain), True

        _compiling.inside = True
        try:
            return falls.compiled(gm, our_pass.options, "graph", with_us, without_us)
        finally:
            _compiling.inside = False

    compile_fx.coda = True  # type: ignore[attr-defined]
    inductor_compile.compile_fx = compile_fx


def _our_pass(options: Mapping[str, Any]) -> _EnabledPass | None:
    settings = [options.get(name, getattr(inductor_config, name, None)) for name in (DYNAMO, JOINT)]
    passes = (p for each in settings for p in (each if isinstance(each, (list, tuple)) else [each]))
    return next((p for p in passes if isinstance(p, _EnabledPass)), None)


def _is_nested() -> bool:
    """Is the graph a part of another graph, which Inductor will pass to us next? Only the call
    stack shows it, because Inductor visits nested graphs with a recursive function."""
    code = getattr(compat.recursive_pre_grad_passes, "__code__", None)
    frames = traceback.walk_stack(inspect.currentframe())
    return sum(frame.f_code is code for frame, _ in frames) > 1
