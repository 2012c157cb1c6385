# SPDX-License-Identifier: Apache-2.0
"""The pass that Inductor runs on the joint (or inference) aten graph: rewrite, decompose, fuse.

It is one ``CustomGraphPass`` with a ``uuid``, so that torch's caches know what it depends on, and
it is idempotent: nested regions are handed to it more than once.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from coda_inductor import patterns
from coda_inductor.debug import Recorder
from coda_inductor.errors import CodaError, FallbackError
from coda_inductor.fuse.driver import fuse_gemms
from coda_inductor.fuse.elementwise import REDUCTIONS
from coda_inductor.graph.edit import refresh_views, splice
from coda_inductor.graph.sides import training
from coda_inductor.graph.snapshots import restore, snapshot
from coda_inductor.log import Failure, count, logger, warn_once
from coda_inductor.options import Options
from coda_inductor.report import record as keep_report
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.rewrite.borders import save_borders
from coda_inductor.rewrite.embedding import gather_lookup_gradients
from coda_inductor.rewrite.loss.slices import slice_loss_gradient
from coda_inductor.rewrite.norm.defer import defer_norms
from coda_inductor.rewrite.packed import split_packed
from coda_inductor.rewrite.recompute import recompute_in_backward
from coda_inductor.rewrite.tables import keep_tables
from coda_inductor.rewrite.views import reshapes_to_views
from coda_inductor.runtime import pool
from coda_inductor.runtime.versions import identity
from coda_inductor.select.policy import Policy
from coda_inductor.semantic.define import DEFINITIONS, NAMES


class _Converted:
    """A policy whose reasons are refusals."""

    def __init__(self, policy: Policy):
        self.policy, self.rounds = policy, policy.rounds

    def legal(self, gemm: Node) -> Refusal | None:
        return _refusal(self.policy.legal(gemm))

    def norm_loses(self, gemms: list[Node], training: bool) -> Refusal | None:
        return _refusal(self.policy.norm_loses(gemms, training))

    def split_loses(self, gemm: Node, training: bool) -> Refusal | None:
        return _refusal(self.policy.split_loses(gemm, training))


def _refusal(reason: str | None) -> Refusal | None:
    return None if reason is None else refuse("defect", reason, failure=isinstance(reason, Failure))


class _Said(Record):
    """A record with its refusals apart."""

    def refuse(self, what: str, where: str, why: Refusal) -> None:
        logger.debug("rewrite: %s at %s refused: %s", what, where, why.text)
        self.refused = [*self.refused, why.at(what, where)]

    refused: list[Refusal] = []


class JointPass(CustomGraphPass):
    """Rewrite, decompose, recompute (in training) and fuse, in this order, on one graph.

    ``before`` is what the user had set as ``joint_custom_pre_pass``: a pass or several; they run
    first. ``dry``: fused sites stay calls, nothing is compiled, counted or kept in ``reports()``.

    Attributes:
        ran: False where torch took the graph from its cache.
        failed: something that the next process may be able to do could not be done (a compiler that
            was killed, a full disk): the result must not be kept in torch's cache.
    """

    def __init__(
        self, options: Options, recorder: Recorder, before: Any = None, *, dry: bool = False
    ):
        self.options, self.recorder, self.dry = options, recorder, dry
        several = isinstance(before, (list, tuple))
        self.before = tuple(before) if several else () if before is None else (before,)
        self.ran = self.failed = False

    def __call__(self, graph: Graph) -> None:
        self.ran = True
        for theirs in self.before:
            theirs(graph)
        _remove_noops(graph)
        kept = snapshot(graph)
        self._fired = Counter[str]()
        try:
            self._run(graph)
        except Exception as error:
            if self.options.strict and isinstance(error, CodaError):
                raise
            if self.options.strict:
                raise FallbackError(f"{type(error).__name__} in our own passes: {error}") from error
            self.failed = True
            cause = f"{type(error).__name__} in our own passes: {error}"
            if self.dry:
                self.recorder.report.near_misses.append(f"everything at the whole graph: {cause}")
            else:
                warn_once("the whole graph", cause)
            logger.debug("traceback", exc_info=True)
            restore(graph, kept)
            _decompose_or_leave(graph, kept)

    def _run(self, graph: Graph) -> None:
        self.recorder.graph("2_traced", _owner(graph))
        report = self.recorder.report
        policy = replace(Policy.of(self.options, graph), dry=self.dry)
        if policy.compiles and not self.dry:
            pool.warm_up()
        _observed(graph, "coda_rewrite", lambda g: self._rewrite(g, policy))
        decompose(graph, keep=REDUCTIONS)
        record = _Said(self.options, policy=_Converted(policy))
        if policy.fuses:
            _observed(graph, "coda_tables", lambda g: keep_tables(g, record))
        if training(graph) and policy.fuses and policy.idle is None:
            _observed(graph, "coda_recompute", lambda g: recompute_in_backward(g, record))
        self.recorder.graph("3_rewritten", _owner(graph))
        _observed(graph, "coda_fuse", lambda g: self._fuse(g, policy))
        decompose(graph)
        if training(graph):
            reshapes_to_views(graph, record)
            _observed(graph, "coda_borders", lambda g: save_borders(g, record))
        refresh_views(graph)
        graph.lint()
        self.recorder.graph("4_fused", _owner(graph))
        self.recorder.finish()
        if not self.dry:
            for name, times in self._fired.items():
                count(name, times)
            keep_report(report)
            logger.info("%s: %s", report.name, report.summary)

    def _rewrite(self, graph: Graph, policy: Policy) -> None:
        record = _Said(self.options, policy=_Converted(policy))
        if policy.fuses:
            slice_loss_gradient(graph, record)
            if training(graph):
                gather_lookup_gradients(graph, record)
        split_packed(graph, record)
        defer_norms(graph, record)
        self._fired.update(record.fired)
        for why in record.refused:
            self.recorder.report.near_misses.append(str(why))
            if why.failure and not self.dry:
                where = f"{why.what} at {why.where}"
                if self.options.strict:
                    raise FallbackError(str(why))
                warn_once(where, why.text)

    def _fuse(self, graph: Graph, policy: Policy) -> None:
        sites, fired = fuse_gemms(graph, policy)
        self.recorder.report.sites += sites
        self.failed |= any(s.fused and isinstance(s.reason, Failure) for s in sites)
        self._fired.update(fired)

    def uuid(self) -> Any:
        """Everything that the result depends on; None (never cached) while debugging."""
        if self.options.debug:
            return None
        inner = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        if None in inner:
            return None
        files = tuple(_digest(path) for path in patterns.files(self.options.patterns))
        everything = (_sources(), self.options.identity, identity(), inner, files)
        return hashlib.sha256(repr(everything).encode()).hexdigest()


def _observed(graph: Graph, name: str, function: Callable[[Graph], None]) -> None:
    """Run a pass under its own name, so that provenance tracking and
    ``torch._inductor.config.disabled_passes`` see it. It must leave a graph that is in order."""
    if graph.owning_module is None:
        function(graph)
    else:
        GraphTransformObserver(graph.owning_module, name).apply_graph_pass(function)
    graph.lint()


def decompose(graph: Graph, keep: Collection[object] = ()) -> None:
    """Semantic ops but those in ``keep`` back to the aten ops that define them, as Inductor would
    have traced them."""
    while todo := [n for n in graph.nodes if n.target in DEFINITIONS and n.target not in keep]:
        for node in todo:
            _decompose_one(graph, node)
    graph.eliminate_dead_code()


def _decompose_one(graph: Graph, node: Node) -> None:
    pattern = NAMES.get(node.target, node.target.__name__.split(".")[0])
    rewritten = node.target not in NAMES and "norm" in pattern  # counted by its own pass
    meta = None if rewritten else {"coda_pattern": (pattern, node.name)}
    result = splice(graph, node, DEFINITIONS[node.target], node.args, like=node, meta=meta)
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _remove_noops(graph: Graph) -> None:
    """Inductor does this after our hook; full slices and no-op clones would hide idioms from us."""
    try:
        remove_noop_ops(graph)
    except Exception:  # a private helper of Inductor's: losing it costs a fusion, not correctness
        logger.debug("remove_noop_ops failed", exc_info=True)


def _decompose_or_leave(graph: Graph, kept: Graph) -> None:
    """After a failure: semantic ops that do not decompose are called as they are, one at a time."""
    try:
        decompose(graph)
        refresh_views(graph)
        graph.lint()
    except Exception:
        logger.debug("decomposing failed", exc_info=True)
        restore(graph, kept)


def _owner(graph: Graph) -> GraphModule | None:
    module = graph.owning_module
    return module if module is not None else GraphModule(torch.nn.Module(), graph)


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    root = Path(__file__).parent
    return "".join(_digest(path) for path in sorted((*root.rglob("*.py"), *root.rglob("*.json"))))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
