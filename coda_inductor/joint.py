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
from coda_inductor.graph.edit import splice
from coda_inductor.graph.sides import training
from coda_inductor.graph.snapshots import refresh_views, restore, snapshot
from coda_inductor.log import Failure, count, logger, warn_once
from coda_inductor.options import Options
from coda_inductor.report import record
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
from coda_inductor.semantic.define import DEFINITIONS


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
        if policy.fuses:
            _observed(graph, "coda_tables", keep_tables)
        if training(graph) and policy.fuses and policy.idle is None:
            keep = self.options.keep_activations
            _observed(graph, "coda_recompute", lambda g: recompute_in_backward(g, keep=keep))
        self.recorder.graph("3_rewritten", _owner(graph))
        _observed(graph, "coda_fuse", lambda g: self._fuse(g, policy))
        decompose(graph)
        if training(graph):
            reshapes_to_views(graph)
            _observed(graph, "coda_borders", save_borders)
        refresh_views(graph)
        graph.lint()
        self.recorder.graph("4_fused", _owner(graph))
        self.recorder.finish()
        if not self.dry:
            for name, times in self._fired.items():
                count(name, times)
            record(report)
            logger.info("%s: %s", report.name, report.summary)

    def _rewrite(self, graph: Graph, policy: Policy) -> None:
        near_misses = self.recorder.report.near_misses
        if policy.fuses:
            sliced, kept = slice_loss_gradient(graph)
            near_misses += kept
            gathered = gather_lookup_gradients(graph) if training(graph) else 0
            fired = {"cross_entropy_backward": sliced, "embedding_backward": gathered}
            self._fired.update({name: times for name, times in fired.items() if times})
        refused = split_packed(graph, policy.legal, policy.split_loses)
        refused |= defer_norms(
            graph,
            policy.legal,
            fp16=self.options.fp16_norms,
            loses=policy.norm_loses,
            rounds=policy.rounds,
            disabled=self.options.disable,
        )
        for where, why in refused.items():
            near_misses.append(f"{where}: {why}")
            if isinstance(why, Failure) and not self.dry:
                if self.options.strict:
                    raise FallbackError(f"{where}: {why}")
                warn_once(where, why)

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
    definition = DEFINITIONS[node.target]
    counted = not definition.counted_by_rewrite
    meta = {"coda_pattern": (definition.name, node.name)} if counted else None
    result = splice(graph, node, definition.function, node.args, like=node, meta=meta)
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
