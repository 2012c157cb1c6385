# SPDX-License-Identifier: Apache-2.0
"""Our passes as Inductor runs them, with a ``uuid`` for the keys of torch's caches. The pass on the
aten graph may run twice on one graph: Inductor calls it more than once for nested regions."""

import abc
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from coda_inductor import notice, optim, patterns
from coda_inductor.compat import CustomGraphPass, functorch_config, inductor_config
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.sizes import hint
from coda_inductor.kernels import QUACK, pool
from coda_inductor.log import warn_once
from coda_inductor.memory import costs
from coda_inductor.memory.limit import limit, room
from coda_inductor.memory.partition import installed
from coda_inductor.options import Options
from coda_inductor.pipeline import on_aten, on_dynamo
from coda_inductor.plan import several_ranks
from coda_inductor.record import Record

_NO_PLANNER = (
    "another custom_partitioner_fn is set in torch._inductor.config or torch.compile's options, or "
    "this torch has none; take it away, or set torch._functorch.config.activation_memory_budget"
)
_HELD = (
    "what a peak leaves for a graph depends on what the device holds when it is compiled: give "
    "explain a share from 0 to 1"
)

_MANY = "gradients of several ranks are added first"
_REPLAYED = "CUDA graphs replay kernels, not optimizers"

#: torch's setting of how much memory is kept, of ``torch._functorch.config``.
BUDGET = "activation_memory_budget"
#: Elements of a weight below which a graph's GEMMs are bound by the host anyway.
_LARGE = 2**21


class HookPass(CustomGraphPass):
    """One of our passes. It runs after the user's passes in the same setting of Inductor.

    Attributes:
        options: the options of this package.
        setting: the user's pass, a list or tuple of passes, or None. These run first.
    """

    def __init__(self, options: Options, setting: Any = None):
        self.options, self.setting = options, setting
        several = isinstance(setting, (list, tuple))
        self.user_passes = tuple(setting) if several else () if setting is None else (setting,)

    def __call__(self, graph: Graph) -> None:
        for user_pass in self.user_passes:
            user_pass(graph)
        self.run(graph)

    def __deepcopy__(self, _memo: Any) -> "HookPass":
        """The same object: ``torch.compile`` makes a deep copy of Inductor's configuration, even
        within a pass, when QuACK is imported and decorates a function with it."""
        return self

    @abc.abstractmethod
    def run(self, graph: Graph) -> None:
        """Run our own part of the pass on ``graph``."""

    def current(self) -> Record | None:
        """The record of the current compilation, if it has begun."""
        return None

    def uuid(self) -> Any:
        """Everything that the result depends on. None (never cached) while debugging, or if a pass
        of the user does not say what it depends on."""
        inner = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.user_passes]
        if None in inner or self.options.debug:
            return None
        record = self.current() or Record(self.options, dry=True)
        parts = inner, [(name, read(record)) for name, read in FACTS.items()]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class JointPass(HookPass):
    """The passes of ``pipeline.ON_ATEN`` on one graph, after the user's in the same setting."""

    def __init__(self, record: Record, setting: Any = None):
        super().__init__(record.options, setting)
        self.record = record

    def current(self) -> Record | None:
        return self.record

    def run(self, graph: Graph) -> None:
        rewrite(graph, self.record, plans=installed())


def rewrite(graph: Graph, record: Record, *, plans: bool = True) -> None:
    """Run the passes on the aten graph. ``plans``: does our partitioner plan its memory?"""
    record.rewritten = True
    record.limit = limit(graph, record.options.memory, record.room) if plans else None
    if not plans and record.options.memory is not None:
        why = _HELD if record.dry else _NO_PLANNER
        warn_once("option 'memory'", why, to="torch's partitioner")
        notice.logged.add("memory")
    on_aten(graph, record)
    notice.after_fusing(record)


def begin(gm: GraphModule, inputs: Sequence[Any], record: Record) -> Callable[..., Any]:
    """Start the compilation of Dynamo's graph ``gm``: messages, the compile workers, and the passes
    on it. Returns the wrapper for the compiled graph.

    Raises:
        OptionError: a name in ``options["disable"]`` does not exist.
        PatternError: with ``strict``, when a pattern file does not load.
        FallbackError: with ``strict``, when a pass or a pattern fails.
    """
    QUACK.try_again()
    costs.install()
    notice.before_compile(gm, inputs, record.options)
    record.room = _room(gm, inputs, record.options.memory)
    record.inputs, record.updates = len(inputs), _updates(inputs, record)
    if record.updates:
        record.wrappers.append(lambda compiled: optim.counted(compiled, record.updates))
    if _may_fuse(inputs, record.options):
        pool.warm_up()  # tracing a model takes seconds as well
    wrap = on_dynamo(gm, record)
    notice.after_matching(gm, record)
    return wrap


def _updates(inputs: Sequence[Any], record: Record) -> tuple[int, ...]:
    places = optim.positions(inputs) if record.wraps and not record.dry else ()
    graphs = record.options.inductor.get("triton.cudagraphs", inductor_config.triton.cudagraphs)
    if places and (why := _MANY if several_ranks() else _REPLAYED if graphs else ""):
        warn_once("optim.in_backward", why, to="optimizer.step(), with all gradients in memory")
        return ()
    return places


def _may_fuse(inputs: Sequence[Any], options: Options) -> bool:
    """Is there a large weight on a GPU with kernels? Asked before anything is traced."""
    if options.reference or options.gate == "never" or QUACK.missing() is not None:
        return False
    tensors = (x for x in inputs if isinstance(x, torch.Tensor) and x.is_cuda and x.dim() == 2)
    return any(hint(x.numel()) >= _LARGE for x in tensors)


def _room(gm: GraphModule, inputs: Sequence[Any], setting: Any) -> int | None:
    """The room that a peak leaves for Dynamo's graph ``gm``; None for a share, and on a CPU."""
    if not isinstance(setting, (int, str)):
        return None
    tensors = (x for x in (*inputs, *map(fake, gm.graph.nodes)) if isinstance(x, torch.Tensor))
    device = next((x.device for x in tensors if x.is_cuda), None)
    return None if device is None else room(setting, device)


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    root = Path(__file__).parent
    return "".join(_digest(path) for path in sorted((*root.rglob("*.py"), *root.rglob("*.json"))))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


#: What a compiled graph depends on, besides the graph and what torch's keys contain anyway: each
#: fact by its name, with the function that reads it. All of them are in the keys of torch's caches:
#: a pass or an option that decides by something else adds it here.
FACTS: dict[str, Callable[[Record], Any]] = {
    "sources": lambda _: _sources(),
    "options": lambda record: record.options.identity,
    "patterns": lambda record: [_digest(p) for p in patterns.files(record.options.patterns)],
    "ranks": lambda _: several_ranks(),
    "budget": lambda _: getattr(functorch_config, BUDGET, 1.0),
    "donated_buffer": lambda _: functorch_config.donated_buffer,
    "room": lambda record: record.room,
    "updates": lambda record: record.updates,
    "kernels": lambda _: {name: read() for name, read in QUACK.facts.items()},
}
