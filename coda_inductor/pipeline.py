# SPDX-License-Identifier: Apache-2.0
"""All passes, in order. ``backend``, ``explain``, ``check`` and the tests run this only list.

A pass is a function ``(graph, record) -> None`` that changes the graph in place and notes its work
in the record. If a pass fails, only its own work is lost, with one warning: the others run as if it
were not in the list. ``options["disable"]`` may name any pass, pattern or counter.
"""

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from coda_inductor import patterns
from coda_inductor.compat import without_saved_tensors_hooks
from coda_inductor.dynamo import attention, late_gradients
from coda_inductor.dynamo.dropouts import multiply_masks
from coda_inductor.dynamo.experts import raise_experts
from coda_inductor.dynamo.frozen_fp8 import differentiate_frozen
from coda_inductor.dynamo.idioms import raise_idioms
from coda_inductor.dynamo.in_place import change_copies
from coda_inductor.dynamo.kept_rows import keep_rows
from coda_inductor.dynamo.loops import score_together
from coda_inductor.dynamo.losses import respell_losses
from coda_inductor.dynamo.packed import split_packed
from coda_inductor.errors import CodaError, FallbackError, OptionError, suggest
from coda_inductor.graph.aliases import mark_writes
from coda_inductor.graph.layout import check_layouts, layouts, refresh_views
from coda_inductor.graph.sides import training
from coda_inductor.graph.snapshots import restore, snapshot
from coda_inductor.kernels import pool, render
from coda_inductor.log import count, logger, say_once, warn_once
from coda_inductor.lowering.driver import fuse_gemms
from coda_inductor.matching import bodies, changes
from coda_inductor.options import GEMM, Options, env_disable
from coda_inductor.plan import Plan
from coda_inductor.record import Record
from coda_inductor.refusal import failed
from coda_inductor.report import record as keep_report
from coda_inductor.rewrite.adapters import reorder_low_rank
from coda_inductor.rewrite.borders import save_borders
from coda_inductor.rewrite.collectives import merge_collectives
from coda_inductor.rewrite.columns import write_columns
from coda_inductor.rewrite.concatenated import add_products
from coda_inductor.rewrite.decompose import decompose, decompose_most
from coda_inductor.rewrite.embedding import gather_lookup_gradients
from coda_inductor.rewrite.experts import finish_experts
from coda_inductor.rewrite.fp8.casts import expand_quantizations
from coda_inductor.rewrite.fp8.raising import raise_fp8
from coda_inductor.rewrite.fp8.rest import finish_fp8
from coda_inductor.rewrite.heads import rotate_rows
from coda_inductor.rewrite.loss.rounded import round_scaled_logits
from coda_inductor.rewrite.loss.slices import slice_loss_gradient
from coda_inductor.rewrite.loss.unstored import compare_targets
from coda_inductor.rewrite.noops import remove_noops
from coda_inductor.rewrite.norm.defer import defer_norms
from coda_inductor.rewrite.parts import part_columns
from coda_inductor.rewrite.recompute import recompute_in_backward
from coda_inductor.rewrite.rows import lay_out_rows
from coda_inductor.rewrite.tables import keep_tables
from coda_inductor.sites import Sites


def _fuses(_graph: Graph, record: Record) -> bool:
    return record.plan.fuses


def _fuses_gradients(graph: Graph, record: Record) -> bool:
    return _fuses(graph, record) and training(graph)


def _recomputes(graph: Graph, record: Record) -> bool:
    """May activations be recomputed? Only kernels do so at no cost; on a CPU, as if for them."""
    return _fuses_gradients(graph, record) and record.plan.no_kernels is None


def _undecided(record: Record) -> Sites:
    return Sites(Plan(record.options, record.dry, record.device, record.gpu))


def _decide(graph: Graph, record: Record) -> None:
    """Decide what may be fused in this graph; start the compile workers, which takes a while."""
    record.sites = Sites(record.plan.for_graph(graph))
    if record.plan.compiles and not record.dry:
        pool.warm_up()


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline.

    Attributes:
        name: its name in logs, the debug folder and ``options["disable"]``.
        run: the function, which changes the graph in place.
        when: a function that tells whether it runs on this graph.
        counts: the counters of its rewrites, besides the names of patterns.
        needed: is the graph wrong or slower without it? Then it cannot be disabled.
        eager: do all values keep their bits? Then it runs with ``options["numerics"]`` "eager" too.
        stage: the name under which the debug folder gets the graph before the pass.
        after: passes that must come before it, because it reads what they write.
    """

    name: str
    run: Callable[[Graph, Record], None]
    when: Callable[[Graph, Record], bool] = lambda _graph, _record: True
    counts: tuple[str, ...] = ()
    needed: bool = False
    eager: bool = False
    stage: str = ""
    after: tuple[str, ...] = ()


#: On Dynamo's graph, where an idiom still looks as its author wrote it.
ON_DYNAMO = (
    Pass("in_place", change_copies, eager=True, stage="0_before"),
    Pass("loops", score_together),
    Pass("losses", respell_losses, after=("loops",)),
    Pass("kept_rows", keep_rows, after=("losses",)),
    Pass("packed", split_packed),
    Pass("dropouts", multiply_masks, counts=("adapter_dropout",)),
    Pass("frozen_fp8", differentiate_frozen, counts=("fp8_linear",)),
    Pass("experts", raise_experts, counts=("experts",)),
    Pass("idioms", raise_idioms, after=("losses", "packed")),
    Pass("attention", attention.simplify_attention, counts=attention.NAMES),
    Pass("block_masks", attention.skip_blocks, counts=(attention.BLOCK_MASK,)),
    Pass("late_gradients", late_gradients.separate, lambda _, record: record.wraps),
)
FUSED = ("residual", "epilogue", "experts_backward")
#: On the aten graph, joint or inference, before it is partitioned.
ON_ATEN = (
    Pass("plan", _decide, needed=True),
    Pass("rows", lay_out_rows, _fuses),
    Pass("noops", remove_noops, eager=True),
    Pass("fp8", raise_fp8, counts=("fp8_quantize", "fp8_product"), after=("noops",)),
    Pass("collectives", merge_collectives, counts=("collective",)),
    Pass("rounded_logits", round_scaled_logits, _fuses),
    Pass("loss", slice_loss_gradient, _fuses, ("cross_entropy_backward",), stage="2_traced"),
    Pass("unstored", compare_targets, _fuses, after=("loss",)),
    Pass("embedding", gather_lookup_gradients, _fuses_gradients, ("embedding_backward",)),
    Pass("adapters", reorder_low_rank, _fuses),
    Pass("concatenated", add_products, _fuses, ("concatenated",)),
    Pass("columns", write_columns, _fuses_gradients),
    Pass("parts", part_columns, _fuses_gradients),
    Pass("norm", defer_norms, after=("columns", "parts")),
    Pass("heads", rotate_rows, _fuses),
    Pass("fp8_casts", expand_quantizations),
    Pass("decompose", decompose_most, needed=True, after=("loss", "norm", "heads", "fp8_casts")),
    Pass("tables", keep_tables, _fuses, eager=True),
    Pass("recompute", recompute_in_backward, _recomputes, eager=True),
    Pass("fuse", fuse_gemms, counts=FUSED, eager=True, stage="3_rewritten", after=("decompose",)),
    Pass("experts_rest", finish_experts, after=("fuse",)),
    Pass("fp8_rest", finish_fp8, after=("fuse",)),
    Pass("decompose_rest", decompose, needed=True, after=("fuse",)),
    Pass("tables", keep_tables, _fuses, eager=True),  # of rotations that no epilogue took
    Pass("borders", save_borders, lambda graph, _: training(graph), eager=True),
    Pass("refresh_views", refresh_views, needed=True, after=("decompose_rest", "borders")),
)


def names(options: Options) -> set[str]:
    """Load the patterns. Returns all names that ``options["disable"]`` takes, except GEMMs and "*".

    Raises:
        PatternError: with ``strict``, when a pattern file does not load.
    """
    loaded = [p.name for p in patterns.load(options.patterns, strict=options.strict)]
    passes = (*ON_DYNAMO, *ON_ATEN)
    counts = {name for step in passes for name in step.counts}
    steps = {step.name for step in passes if not step.needed}
    return {*loaded, *(f"{name}_backward" for name in loaded), *counts, *steps}


def check_names(record: Record) -> None:
    """Load the patterns, and check that the names in ``options["disable"]`` exist.

    Raises:
        OptionError: a name does not exist (one in ``CODA_DISABLE`` may), or names a needed pass.
        PatternError: with ``strict``, when a pattern file does not load.
    """
    known = names(record.options)
    disabled = {name for name in record.options.disable if not name.startswith(GEMM)}
    for step in (*ON_DYNAMO, *ON_ATEN):
        if step.needed and step.name in disabled:
            raise OptionError(f"option 'disable': the pass {step.name!r} cannot be disabled")
    if unknown := sorted(disabled - known):
        typos = ", ".join(f"{name!r}{suggest(name, known)}" for name in unknown)
        text = f"there is no {typos}; `python -m coda_inductor --names` lists all names"
        if not set(unknown) <= set(env_disable()):
            raise OptionError(f"option 'disable': {text}")
        say_once(f"CODA_DISABLE: {text}")  # another graph may have other patterns


@without_saved_tensors_hooks()  # a user's hooks would receive our fake tensors
def on_dynamo(gm: GraphModule, record: Record) -> Callable[[Callable[..., Any]], Any]:
    """Run the passes on Dynamo's graph ``gm``. Returns the wrapper for the compiled graph.

    Raises:
        OptionError: see :func:`check_names`.
        PatternError: see :func:`check_names`.
        FallbackError: with ``strict``, when a pass or a pattern fails.
    """
    check_names(record)
    record.sites = _undecided(record)
    writes = (node for body in bodies(gm.graph) for node in changes(body.graph))
    record.writes_inputs = any(node.op in ("placeholder", "get_attr") for node in writes)
    _run(ON_DYNAMO, gm.graph, record)
    for body in bodies(gm.graph):
        body.module.recompile()
    record.folder.graph("1_raised", gm)
    _count(record)
    wraps, record.wrappers = record.wrappers, []  # of this graph, not of the record's next one
    return lambda compiled: functools.reduce(lambda call, wrap: wrap(call), wraps, compiled)


def on_aten(graph: Graph, record: Record) -> None:
    """Run the passes on a joint or inference graph, in place.

    Raises:
        FallbackError: with ``strict``, when a pass fails or a site falls back because of a failure.
    """
    before = len(record.report.sites)
    record.sites = _undecided(record)
    mark_writes(graph, later=record.writes_inputs)
    _run(ON_ATEN, graph, record)
    record.folder.graph("4_fused", _owner(graph))
    _count(record)
    record.folder.finish(record.report, render, record.changed)
    record.sites = Sites(record.plan)  # compiled code keeps the record, which shall keep no graph
    if record.dry:
        return
    if keep_report(record.report) or len(record.report.sites) > before:
        logger.info("%s: %s", record.report.name, record.report.summary)


class _FailedError(Exception):
    """A pass failed; the message says which one, and why."""

    def __init__(self, step: Pass, error: Exception):
        super().__init__(step.name)
        self.step, self.error = step, error


def _run(passes: Sequence[Pass], graph: Graph, record: Record) -> None:
    """Run ``passes``, except those that fail; each cause is a warning, an error with ``strict``.

    There is one copy of the graph, from before the first pass, and after a failure the other passes
    start over from it. A copy before each pass would take a third of our time, and failures are
    rare. If a needed pass fails, only needed passes run: the others rely on it.
    """
    copies = [(module, inner, snapshot(inner)) for module, inner in _graphs(passes, graph)]
    start, remaining = len(record.report.refusals), list(passes)
    causes: dict[str, Exception] = {}
    while True:
        try:
            with record.undone_on_error():
                _run_all(remaining, graph, record)
            break
        except _FailedError as error:
            causes[error.step.name] = error.error
            remaining.remove(error.step)
            if error.step.needed:
                remaining = [step for step in remaining if step.needed]
            for module, inner, old in copies:
                restore(inner, old)
                if module is not None:
                    module.recompile()
    for name, cause in causes.items():
        record.refuse("pass", name, failed(cause))
        record.failed = True
    for refusal in record.report.refusals[start:]:
        if refusal.failure and not record.dry:
            if record.options.strict:
                raise FallbackError(str(refusal))
            warn_once(refusal.what, refusal.text, first=refusal.where)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """A context without garbage collection, which would take a fifth of the passes' time and free
    nothing, because their objects stay alive."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_gc()
def _run_all(passes: Sequence[Pass], graph: Graph, record: Record) -> None:
    before = _state(passes, graph, record)
    seen = layouts(graph) if _are_aten(passes) else {}
    for step in passes:
        if step.stage:
            record.folder.graph(step.stage, _owner(graph))
        rounds_elsewhere = record.options.numerics == "eager" and not (step.needed or step.eager)
        if rounds_elsewhere or not record.enabled(step.name):
            continue
        try:
            if step.when(graph, record):
                _observe(step, graph, record)
                after = _state(passes, graph, record)
                if after != before:
                    check_layouts(seen)
                    record.changed |= {} if step.needed else {step.name: None}
                before = after
        except Exception as error:
            if record.options.strict:
                if isinstance(error, CodaError):
                    raise
                raise FallbackError(f"pass {step.name}: {failed(error).text}") from error
            logger.debug("pass %s failed", step.name, exc_info=True)
            raise _FailedError(step, error) from error


def _observe(step: Pass, graph: Graph, record: Record) -> None:
    """Run a pass under its own name, so that provenance tracking and
    ``torch._inductor.config.disabled_passes`` see it. It must leave an aten graph in order."""
    if step not in ON_ATEN or graph.owning_module is None:
        step.run(graph, record)
    else:
        observer = GraphTransformObserver(graph.owning_module, f"coda_{step.name}")
        observer.apply_graph_pass(lambda g: step.run(g, record))
    if step in ON_ATEN:
        graph.lint()


def _count(record: Record) -> None:
    if not record.dry:
        for name, times in record.fired.items():
            count(name, times)
    record.report.fired.update(record.fired)
    record.fired = Counter()


def _are_aten(passes: Sequence[Pass]) -> bool:
    return all(step in ON_ATEN for step in passes)


def _graphs(passes: Sequence[Pass], graph: Graph) -> list[tuple[GraphModule | None, Graph]]:
    """The graphs that passes may change: an aten graph, or Dynamo's with checkpointed regions."""
    if _are_aten(passes):
        return [(None, graph)]
    return [(body.module, body.graph) for body in bodies(_owner(graph).graph)]


def _state(passes: Sequence[Pass], graph: Graph, record: Record) -> tuple[Any, ...]:
    """A value that differs after nearly every change of the graph, and is fast to compute."""
    nodes = [n for _, inner in _graphs(passes, graph) for n in inner.nodes]
    return nodes, [n.target for n in nodes], record.fired.copy()


def _owner(graph: Graph) -> GraphModule:
    return graph.owning_module or GraphModule({}, graph)
