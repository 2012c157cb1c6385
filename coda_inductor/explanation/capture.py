"""Capture a model's graphs as torch.compile would see them, with and without our passes.

Dynamo runs, AOTAutograd traces, the partitioner splits; no code is generated and nothing of the
model is run: the backend raises as soon as it has what it wants, so that Dynamo installs nothing
and replays no side effect. A model with graph breaks has to be run to get past them: that happens
on a copy, with the random state put back and our own cache entries invalidated.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node

from coda_inductor import late_gradients
from coda_inductor.backend import raise_pass
from coda_inductor.debug import Recorder
from coda_inductor.errors import ExplainError
from coda_inductor.joint import JointPass
from coda_inductor.options import Options
from coda_inductor.report import GraphReport


@dataclass
class Parts:
    """One graph as it would be compiled: ``graphs`` holds the inference graph, or the forward and
    the backward one; ``saved`` what the forward pass leaves for the backward."""

    graphs: list[Graph] = field(default_factory=list)
    saved: list[Node] = field(default_factory=list)


@dataclass
class Captured:
    """One Dynamo graph without (``stock``) and with our passes (``ours``), and their report."""

    stock: Parts
    ours: Parts
    report: GraphReport
    training: bool


@dataclass
class Capture:
    """All graphs of a model, and why there is more than one (empty if there is not)."""

    graphs: list[Captured]
    breaks: str = ""


class _Enough(Exception):  # noqa: N818 (no error: the capture is complete)
    """Raised by the backend once a graph is captured."""


class _Backend:
    """The torch.compile backend that captures. ``stop``: at the first graph."""

    def __init__(self, options: Options, *, stop: bool):
        self.options, self.stop = options, stop
        self.found: list[Captured] = []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        stock, _ = _trace(gm, inputs, None)
        recorder = Recorder(f"graph {len(self.found)}", None)
        raise_pass(gm, self.options, recorder, dry=True)
        around = late_gradients.separate(gm)
        joint = JointPass(self.options, recorder, dry=True)
        ours, training = _trace(gm, inputs, joint)
        self.found.append(Captured(stock, ours, recorder.report, training))
        if self.stop:
            raise _Enough
        return around(gm.forward)


def capture(function: Callable[..., Any], args: tuple, kwargs: dict, options: Options) -> Capture:
    """Capture every graph of ``function(*args, **kwargs)``; module docstring.

    Raises:
        ExplainError: Dynamo finds no graph, or the model itself fails; the cause is chained.
    """
    backend = _Backend(options, stop=True)
    with _undisturbed():
        try:
            torch.compile(function, backend=backend, fullgraph=True)(*args, **kwargs)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _Enough):
                raise error.inner_exception from None
        except Unsupported as error:
            return _broken(function, args, kwargs, options, str(error))
        except Exception as error:
            raise ExplainError(
                f"the model cannot be traced: {type(error).__name__}: {error}"
            ) from error
    if not backend.found:
        raise ExplainError("torch.compile finds no graph in this call: it computes no tensors")
    return Capture(backend.found)


def _broken(
    function: Callable[..., Any], args: tuple, kwargs: dict, options: Options, why: str
) -> Capture:
    """Capture past graph breaks: run a copy. Dynamo shares its cache between copies, for it hangs
    on code objects, so that our entries are taken out one by one."""
    backend = _Backend(options, stop=False)
    codes: list[Any] = []
    hook = torch._dynamo.convert_frame.register_bytecode_hook(lambda old, _new: codes.append(old))
    try:
        function, args, kwargs = copy.deepcopy((function, args, kwargs))
        torch.compile(function, backend=backend)(*args, **kwargs)
    except BackendCompilerFailed as error:
        raise error.inner_exception from None
    except Exception as error:
        raise ExplainError(f"the model fails: {type(error).__name__}: {error}") from error
    finally:
        hook.remove()
        for code in codes:
            _forget(code, backend)
    if not backend.found:
        raise ExplainError(f"torch.compile finds no graph in this call. Its first break: {why}")
    return Capture(backend.found, why)


def _forget(code: Any, backend: _Backend) -> None:
    """Invalidate the cache entries of ``backend`` in ``code``. Private names of torch's: where they
    are gone, the entries stay, and a later compile of the same code checks one guard more."""
    with contextlib.suppress(AttributeError, ImportError):
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        for entry in _debug_get_cache_entry_list(code):
            if getattr(entry.backend, "compiler_fn", entry.backend) is backend:
                deleted = DeletedGuardManagerWrapper("coda_inductor.explain has ended")
                state: Any = entry.guard_manager.extra_state
                state.invalidate(entry, deleted)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave no trace: random state, compile caches, torch's own handling of backend errors."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with (
        torch.random.fork_rng(devices),
        torch._dynamo.config.patch(suppress_errors=False, automatic_dynamic_shapes=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        _own_sizes(),
    ):
        yield


@contextlib.contextmanager
def _own_sizes() -> Iterator[None]:
    """Give Dynamo a memory of sizes of its own. A private name of torch's (2.11 to 2.13): where it
    is gone, a size seen here may become dynamic in the user's next compile of the same code."""
    from torch._dynamo import pgo

    if not hasattr(pgo, "_CODE_STATE"):
        yield
        return
    kept = pgo._CODE_STATE
    pgo._CODE_STATE = copy.deepcopy(kept)
    try:
        yield
    finally:
        pgo._CODE_STATE = kept


def _trace(gm: GraphModule, inputs: Sequence[Any], joint: JointPass | None) -> tuple[Parts, bool]:
    """Trace and split ``gm`` as Inductor does, with ``joint`` in front of the split. Also says
    whether there is a backward pass."""
    parts = Parts()
    training = False

    def partition(joint_gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        nonlocal training
        training = True
        if joint is not None:
            joint(joint_gm.graph)
            joint_gm.recompile()
        split = min_cut_rematerialization_partition(joint_gm, joint_inputs, **kwargs)
        parts.graphs += [split[0].graph, split[1].graph]
        outputs = split[0].graph.output_node().args[0]
        parts.saved += [n for n in outputs[kwargs["num_fwd_outputs"] :] if isinstance(n, Node)]
        return split

    def inference(traced: GraphModule, _inputs: Any) -> Any:
        if joint is not None:
            joint(traced.graph)
            traced.recompile()
        parts.graphs.append(traced.graph)
        return make_boxed_func(traced.forward)

    compiler = aot_autograd(
        fw_compiler=lambda part, _: make_boxed_func(part.forward),
        bw_compiler=lambda part, _: make_boxed_func(part.forward),
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    compiler(gm, inputs)
    return parts, training
