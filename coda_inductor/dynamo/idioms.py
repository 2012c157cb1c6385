# SPDX-License-Identifier: Apache-2.0
"""Idioms in Dynamo's torch-level graph become semantic ops.

Before::

    pow_1 = x.pow(2); mean = pow_1.mean(-1, keepdim=True); ... ; mul_1 = weight * to_1

After::

    rms_norm = torch.ops.coda_inductor.rms_norm.default(x, weight, 1e-06, torch.bfloat16)

Runs before AOTAutograd, where an idiom still looks as its author wrote it. Nodes that only the
idiom read are erased, except in-place ops: Dynamo's graph is not functional.
Refuses a match when a mutation or a mode change is between its nodes, when its inputs change before
its gradient reads them, when an intermediate is used elsewhere, when the graph uses forward-mode
differentiation (semantic ops have a reverse mode only), or when a side condition of the pattern
fails; the reason is logged and kept.
"""

import operator
import traceback
from pathlib import Path

import torch
from torch.fx import Graph, Node

from coda_inductor import patterns
from coda_inductor.compat import tree_leaves
from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import fake, is_erased
from coda_inductor.graph.read import kind
from coda_inductor.graph.sizes import same_strides
from coda_inductor.log import logger, warn_once
from coda_inductor.matching import Flat, Hazards, Match, bodies, first_match, match_ops
from coda_inductor.matching.guards import forward_mode, replace, writes_to
from coda_inductor.patterns import Pattern
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse

_PACKAGE = Path(__file__).resolve().parents[1]


def raise_idioms(graph: Graph, record: Record) -> None:
    """Replace every idiom of every enabled pattern in ``graph`` and its checkpointed regions, in
    place. Tensors keep shapes, dtypes and devices; parameters do not change."""
    loaded = patterns.load(record.options.patterns, strict=record.options.strict)
    dual = forward_mode(graph)
    for body in bodies(graph):
        ops = {node: match_ops(node) for node in body.graph.nodes}
        for pattern in loaded:
            if _raise(body.graph, pattern, ops, record, dual):
                ops = {node: match_ops(node) for node in body.graph.nodes}


def _raise(
    graph: Graph, pattern: Pattern, ops: dict[Node, set[str]], record: Record, dual: Refusal | None
) -> bool:
    """Replace every idiom of ``pattern`` in one graph, whose nodes may be matched as ``ops``.
    ``dual``: the reason if none may be. Returns whether any was replaced."""
    present = set().union(*ops.values())
    idioms = [idiom for idiom in pattern.traced if idiom.ops <= present]
    if not idioms:
        return False
    fired, hazards, last = False, Hazards(graph), {idiom.op for idiom in idioms}
    # Last node first: the longest spelling of an idiom ends last and must win over its own parts.
    for root in reversed(ops):
        if is_erased(root) or last.isdisjoint(ops[root]):
            continue
        try:  # a failure here affects only this match: the graph is unchanged
            match = first_match(idioms, root)
            if match is not None and not record.enabled(pattern.name):
                break
            why = None if match is None else dual or _refusal(pattern, match, hazards)
        except Exception as error:
            cause = f"{type(error).__name__}: {error} ({_where(error)})"
            why = refuse("pattern-failed", f"the pattern itself failed: {cause}")
            if not record.dry:  # only this match is lost, with ``strict`` too
                warn_once(f"pattern {pattern.name}", why.text)
            logger.debug("traceback", exc_info=True)
        if why is not None:
            record.refuse(pattern.name, root, why)
        elif match is not None:
            _replace(pattern, match)
            fired = True
    return fired


def _refusal(pattern: Pattern, match: Match, hazards: Hazards) -> Refusal | None:
    hazard = _hazard(match, hazards) or _changed(match, hazards.writes)
    return hazard or pattern.refusal(match) or _mismatch(pattern, match)


def _where(error: Exception) -> str:
    """``file.py:12``: the line of a pattern file that caused the error, else the raising line."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not Path(frame.filename).is_relative_to(_PACKAGE)]
    frame = outside[0] if outside else frames[-1]
    return f"{frame.filename}:{frame.lineno}"


def _hazard(match: Match, hazards: Hazards) -> Refusal | None:
    covered = set(match.nodes) | set(match.casts)
    if hazards.between(covered.union(*match.twins)):
        text = "an in-place op or a grad/autocast mode change is between its nodes"
        return refuse("mutation", text)
    leaves = _leaves(match)
    wide = next((n for n in covered if _widens(n)), None)
    if wide is not None:
        return refuse("float64-mixed", f"{wide.name} casts to float64, its input has less")
    bound = [t for v in match.bound.values() if isinstance(t := fake(v), torch.Tensor)]
    inputs = {t.dtype for t in bound if t.is_floating_point()}
    if torch.float64 in inputs and len(inputs) > 1:
        text = "it mixes float64 with another type, so steps differ in the type they compute in"
        return refuse("float64-mixed", text)
    for node in (*match.nodes, *match.casts):
        if node is match.root or node in leaves:
            continue  # a cast or flattened input may have other readers; it simply stays
        if any(user not in covered for user in node.users):
            return refuse("intermediate-used", f"its intermediate {node.name} is used elsewhere")
    return None


def _leaves(match: Match) -> set[Node]:
    leaves = {n for n in match.bound.values() if isinstance(n, Node)}
    views = [n for n in match.nodes if kind(n) == "names"]
    for node in sorted((*match.casts, *views)):  # in the graph's order
        if node.all_input_nodes[0] in leaves:
            leaves.add(node)
    return leaves.difference(match.bound.values())


def _changed(match: Match, writes: list[Node]) -> Refusal | None:
    """The reason if a later op changes in place an input that the op saves for its gradient, else
    None. Eager may save another tensor: a log-softmax saves its result, not its logits."""
    if not getattr(fake(match.root), "requires_grad", False):
        return None
    inputs = [n for n in match.bound.values() if isinstance(n, Node)]
    for node in writes:
        if node > match.root and writes_to(node, inputs):
            return refuse("mutation", f"{node.name} changes in place what its gradient reads")
    return None


def _widens(node: Node) -> bool:
    """Does ``node`` cast to float64? The op would compute in float32."""
    values = [tree_leaves(fake(n)) for n in (node, *node.all_input_nodes)]  # lists of a split
    result, *inputs = (getattr(leaves[0], "dtype", None) if leaves else None for leaves in values)
    double = (torch.float64, torch.complex128)
    return result in double and not any(dtype in double for dtype in inputs)


def _fake(arg: object) -> object:
    return fake(arg.node).reshape(-1) if isinstance(arg, Flat) else fake(arg)


def _mismatch(pattern: Pattern, match: Match) -> Refusal | None:
    """The reason if the op's result, for recorded fake values, is unlike the idiom's; or None."""
    want = fake(match.root)
    if not isinstance(want, torch.Tensor):
        return refuse("idiom-form", "no fake value is recorded")
    if (mode := getattr(want, "fake_mode", None)) is None:
        text = f"it is computed on a {type(want).__name__}, which only torch's own ops support"
        return refuse("distributed-tensor", text)
    with mode:
        have = pattern.call(*map(_fake, pattern.arguments(match)))
    for name in ("dtype", "shape", "device"):
        if getattr(want, name) != getattr(have, name):
            text = f"{name} would change from {getattr(want, name)} to {getattr(have, name)}"
            return refuse("result-dtype" if name == "dtype" else "idiom-form", text)
    # A view or an as_strided of the result relies on its strides.
    if same_strides(want, have):
        return None
    text = f"stride would change from {want.stride()} to {have.stride()}"
    return refuse("result-layout", text)


def _replace(pattern: Pattern, match: Match) -> None:
    root, put = match.root, Put(match.root)
    arguments = pattern.arguments(match)
    arguments = [put("reshape", a.node, -1) if isinstance(a, Flat) else a for a in arguments]
    new = put(pattern.op, *arguments)
    if pattern.result is not None:
        new = put(operator.getitem, new, pattern.result)
    new.meta = dict(root.meta)  # views of it are recorded as views of this value
    replace(root, new)
    logger.debug("raise: %s at %s", pattern.name, new.name)
