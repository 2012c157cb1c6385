# SPDX-License-Identifier: Apache-2.0
"""Capture a model's graphs as torch.compile would see them, with and without our passes, and
explain the difference.

Dynamo, AOTAutograd and the partitioner run; no code is generated and the model does not run: the
backend raises as soon as it has the graph, so that Dynamo installs no code and replays no side
effect. A model with graph breaks must be run to get past them: that happens on a copy. Dynamo sees
a model on meta as on a CPU, because torch's ops for meta are others: attention there keeps all its
scores for the backward pass, and a loss has no gradient.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from coda_inductor import compat
from coda_inductor.dynamo.frozen_fp8 import differentiate_frozen
from coda_inductor.errors import ExplainError
from coda_inductor.explanation.result import Explanation
from coda_inductor.gpu import Gpu
from coda_inductor.graph.gemms import TRACED
from coda_inductor.graph.nodes import bytes_of, fake, may_view
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import hint
from coda_inductor.graph.walk import base
from coda_inductor.lowering.described import unfused
from coda_inductor.memory.candidates import maker
from coda_inductor.options import EVERYTHING, Options
from coda_inductor.record import Record
from coda_inductor.refusal import refuse
from coda_inductor.report import UNFUSED, GraphReport
from coda_inductor.tracing import Traced, dry_run, trace

_CPU = torch.device("cpu")


@dataclass
class Captured:
    """One Dynamo graph without (``stock``) and with our passes (``traced``), and the report.
    ``devices``: the types of the devices of its inputs."""

    stock: Traced
    traced: Traced
    report: GraphReport
    devices: list[str]


def build(name: str, graphs: list[Captured], breaks: str, gpu: Gpu) -> Explanation:
    """The explanation of the model ``name`` with these graphs, as on ``gpu``. ``breaks``: the
    reason if there are several graphs."""
    devices = Counter(device for g in graphs for device in g.devices)
    device = devices.most_common(1)[0][0] if devices else "cpu"
    result = Explanation(name, device, any(g.traced.training for g in graphs), gpu.article)
    for captured in graphs:
        result.sites += captured.report.sites
        result.near_misses += captured.report.refusals
        result.saved_bytes_before += _saved_bytes(captured.stock)
        result.saved_bytes_after += _saved_bytes(captured.traced)
    result.notes = _notes(result, graphs, breaks)
    return result


def _saved_bytes(parts: Traced) -> int:
    """Each tensor counts once. Inputs, which exist anyway, do not."""
    roots = {base(node, lambda n: may_view(maker(n))) for node in parts.saved}
    return sum(bytes_of(root) for root in roots if root.op != "placeholder")


def _notes(result: Explanation, graphs: list[Captured], breaks: str) -> list[str]:
    notes = []
    if result.device != "cuda":
        notes.append(
            f"The tensors are on {result.device}, where no kernels run: this is what would run on "
            f"{result.gpu}, from measurements on one (--gpu names another)."
        )
    notes += [f"Memory: it {g.report.memory}." for g in graphs if g.report.memory is not None]
    if breaks:
        reason = " ".join(breaks.split("\n", maxsplit=1)[0].split())
        notes.append(
            f"The model breaks into {len(graphs)} graphs, and idioms and fusions end at a break. "
            f"The first break: {reason}"
        )
    return notes


class _Enough(Exception):  # noqa: N818 (not an error: the capture is complete)
    """The backend raises this once a graph is captured."""


class _Backend:
    """The torch.compile backend that captures graphs. ``stop``: raise at the first graph;
    ``kwargs``: the arguments of ``Record`` that concern the GPU."""

    def __init__(self, options: Options, stop: bool, **kwargs: Any):
        self.options, self.stop, self.kwargs = options, stop, kwargs
        self.graphs: list[Captured] = []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        record = Record(self.options, f"graph {len(self.graphs)}", dry=True, **self.kwargs)
        differentiate_frozen(gm.graph, record)  # torch alone has no gradient of it to compare with
        gm.recompile()
        stock = trace(gm, inputs)
        off = [name for name in (EVERYTHING, "fuse") if not record.enabled(name)]
        traced = stock if EVERYTHING in off else dry_run(gm, inputs, record)
        if off:
            why = refuse("disabled", f"options['disable'] names {off[0]!r}")
            scope, choice = Scope(traced.whole), replace(UNFUSED, refusal=why)
            gemms = [node for node in traced.whole.nodes if node.target in TRACED]
            record.report.sites += [replace(unfused(n, scope), choice=choice) for n in gemms]
        devices = [x.device.type for x in inputs if isinstance(x, torch.Tensor)]
        self.graphs.append(Captured(stock, traced, record.report, devices))
        if self.stop:
            raise _Enough
        return traced.wrapper(_results_on_meta(gm) if "meta" in devices else gm.forward)


def capture(
    model: Callable[..., Any], args: tuple, kwargs: dict, options: Options,
    device: torch.device | None = None, gpu: Gpu | None = None,
) -> tuple[list[Captured], str]:  # fmt: skip
    """(graphs, breaks): every graph of ``model(*args, **kwargs)``, see the module docstring, and
    the reason if there are several (else empty). ``device`` and ``gpu`` as in ``Record``; sites are
    measured there if ``options`` asks for it.

    Raises:
        ExplainError: Dynamo finds no graph, or the model itself fails; the cause is chained.
    """
    why = ""
    with _undisturbed():
        try:
            graphs = _capture(model, args, kwargs, _Backend(options, True, device=device, gpu=gpu))
        except (compat.Unsupported, compat.UserError) as error:
            why, retry = str(error), _Backend(options, False, device=device, gpu=gpu)
            graphs = _capture(model, args, kwargs, retry)
    if not graphs:
        reason = f". Its first break: {why}" if why else ": it computes no tensors"
        raise ExplainError(f"torch.compile captures no graph in this call{reason}")
    return graphs, why


def _capture(
    function: Callable[..., Any], args: tuple, kwargs: dict, backend: _Backend
) -> list[Captured]:
    """The graphs of one call. With graph breaks a copy runs, to get past them. Our entries stay in
    Dynamo's cache, which belongs to code objects: a later compile checks a few more guards."""
    try:
        if not backend.stop:
            function, args, kwargs = copy.deepcopy((function, args, kwargs))
        torch.compile(function, backend=backend, fullgraph=backend.stop)(*args, **kwargs)
    except compat.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _Enough):
            raise error.inner_exception from None
    except Exception as error:
        if backend.stop and isinstance(error, (compat.Unsupported, compat.UserError)):
            raise
        verb = "cannot be traced" if backend.stop else "fails"
        raise ExplainError(f"the model {verb}: {type(error).__name__}: {error}") from error
    graphs, backend.graphs = backend.graphs, []  # Dynamo's cache holds the backend
    return graphs


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    # Dynamo's memory of sizes has a private name (torch 2.11 to 2.15). If it were the user's, a
    # size seen here might become dynamic in the next compile of the same code.
    sizes = copy.deepcopy(getattr(compat.pgo, "_CODE_STATE", None))
    with (
        torch.random.fork_rng(devices),
        compat.dynamo_config.patch(suppress_errors=False, automatic_dynamic_shapes=False),
        compat.functorch_config.patch(enable_autograd_cache=False),
        mock.patch.object(compat.pgo, "_CODE_STATE", sizes, create=True),
        _meta_as_cpu(),
    ):
        yield


@contextlib.contextmanager
def _meta_as_cpu() -> Iterator[None]:
    describe = compat.MetaTensorDescriber.describe_tensor

    def described(self: Any, tensor: torch.Tensor, **how: Any) -> Any:
        found = describe(self, tensor, **how)
        return replace(found, device=_CPU) if found.device.type == "meta" else found

    default = _CPU if torch.get_default_device().type == "meta" else contextlib.nullcontext()
    with mock.patch.object(compat.MetaTensorDescriber, "describe_tensor", described), default:
        yield


def _results_on_meta(gm: GraphModule) -> Callable[..., Any]:
    (results,) = gm.graph.output_node().args
    values = [fake(result) for result in results]
    return lambda *_: [_on_meta(v) if isinstance(v, torch.Tensor) else v for v in values]


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    sizes, strides = (tuple(map(hint, each)) for each in (value.shape, value.stride()))
    like = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return like.requires_grad_(value.requires_grad).clone()  # no leaf: it may be changed in place
