"""The pass that Inductor runs on the joint (or inference) aten graph: rewrite, decompose, fuse.

It is one ``CustomGraphPass`` with a ``uuid``, so that torch's caches know what it depends on, and
it is idempotent: nested regions are handed to it more than once.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
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
from coda_inductor.fuse import Policy, fuse_gemms
from coda_inductor.graph import fake, splice
from coda_inductor.log import Failure, count, logger, warn_once
from coda_inductor.options import Options
from coda_inductor.report import record
from coda_inductor.rewrite import defer_norms, recompute_in_backward, save_borders, split_packed
from coda_inductor.runtime import pool
from coda_inductor.runtime.versions import identity
from coda_inductor.semantic import DEFINITIONS
from coda_inductor.sides import training


class JointPass(CustomGraphPass):
    """Rewrite, decompose, recompute (in training) and fuse, in this order, on one graph.

    ``before`` is what the user had set as ``joint_custom_pre_pass``: a pass or several; they run
    first.
    """

    def __init__(self, options: Options, recorder: Recorder, before: Any = None):
        self.options, self.recorder = options, recorder
        several = isinstance(before, (list, tuple))
        self.before = tuple(before) if several else () if before is None else (before,)

    def __call__(self, graph: Graph) -> None:
        for theirs in self.before:
            theirs(graph)
        _remove_noops(graph)
        snapshot = Graph()
        snapshot.output(snapshot.graph_copy(graph, {}))
        try:
            self._run(graph)
        except Exception as error:
            if self.options.strict and isinstance(error, CodaError):
                raise
            if self.options.strict:
                raise FallbackError(f"{type(error).__name__} in our own passes: {error}") from error
            warn_once("the whole graph", f"{type(error).__name__} in our own passes: {error}")
            logger.debug("traceback", exc_info=True)
            _restore(graph, snapshot)
            decompose(graph)
        graph.lint()

    def _run(self, graph: Graph) -> None:
        self.recorder.graph("2_traced", _owner(graph))
        report = self.recorder.report
        policy = Policy.of(self.options, graph)
        on_gpu = any(getattr(fake(n), "is_cuda", False) for n in graph.nodes)
        if on_gpu and policy.small is None:
            pool.warm_up()
        _observed(graph, "coda_rewrite", lambda g: self._rewrite(g, policy))
        decompose(graph)
        if training(graph) and policy.fuses:
            keep = self.options.keep_activations
            _observed(graph, "coda_recompute", lambda g: recompute_in_backward(g, keep=keep))
        self.recorder.graph("3_rewritten", _owner(graph))
        _observed(graph, "coda_fuse", lambda g: self._fuse(g, policy))
        if training(graph):
            _observed(graph, "coda_borders", save_borders)
        self.recorder.graph("4_fused", _owner(graph))
        self.recorder.finish()
        record(report)

    def _rewrite(self, graph: Graph, policy: Policy) -> None:
        refused = split_packed(graph, policy.legal, policy.split_loses)
        refused |= defer_norms(
            graph,
            policy.legal,
            fp16=self.options.fp16_norms,
            loses=policy.norm_loses,
            disabled=self.options.disable,
        )
        for where, why in refused.items():
            self.recorder.report.near_misses.append(f"{where}: {why}")
            if isinstance(why, Failure):
                if self.options.strict:
                    raise FallbackError(f"{where}: {why}")
                warn_once(where, why)

    def _fuse(self, graph: Graph, policy: Policy) -> None:
        sites, fired = fuse_gemms(graph, policy)
        self.recorder.report.sites += sites
        for name, times in fired.items():
            count(name, times)

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
    ``torch._inductor.config.disabled_passes`` see it."""
    if graph.owning_module is None:
        function(graph)
    else:
        GraphTransformObserver(graph.owning_module, name).apply_graph_pass(function)


def decompose(graph: Graph) -> None:
    """Semantic ops back to the aten ops that define them, as Inductor would have traced them."""
    for node in [n for n in graph.nodes if n.target in DEFINITIONS]:
        pattern = node.target.__name__.split(".")[0]
        meta = {"coda_pattern": (pattern, node.name)} if "norm" not in pattern else None
        result = splice(graph, node, DEFINITIONS[node.target], node.args, like=node, meta=meta)
        if isinstance(result, Node):
            node.replace_all_uses_with(result)
        else:
            for user in list(node.users):
                user.replace_all_uses_with(result[user.args[1]])
                graph.erase_node(user)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _remove_noops(graph: Graph) -> None:
    """Inductor does this after our hook; full slices and no-op clones would hide idioms from us."""
    try:
        remove_noop_ops(graph)
    except Exception:  # a private helper of Inductor's: losing it costs a fusion, not correctness
        logger.debug("remove_noop_ops failed", exc_info=True)


def _restore(graph: Graph, snapshot: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    graph.output(graph.graph_copy(snapshot, {}))


def _owner(graph: Graph) -> GraphModule | None:
    module = graph.owning_module
    return module if module is not None else GraphModule(torch.nn.Module(), graph)


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    root = Path(__file__).parent
    return "".join(_digest(path) for path in sorted((*root.rglob("*.py"), *root.rglob("*.json"))))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
