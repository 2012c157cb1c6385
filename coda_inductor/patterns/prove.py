# SPDX-License-Identifier: Apache-2.0
"""The claims of a pattern, and their proof.

- Each idiom equals the meaning; or, for each element of the tensors of its examples, the definition
  of the semantic op.
- The author's gradient, if any, equals the derivative of the meaning, wherever that has one.

Side conditions are not proven: that they suffice for shapes and dtypes is the author's claim, which
``python -m coda_inductor check`` tries on the example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.errors import PatternError
from coda_inductor.matching import Match, normalize, target_name
from coda_inductor.patterns.equal import difference
from coda_inductor.patterns.exact import Exact, expression
from coda_inductor.patterns.meaning import Signature
from coda_inductor.patterns.pattern import Pattern
from coda_inductor.semantic.define import DEFINITIONS, parameters

#: Functions of whole rows, which a norm may have and a meaning may not.
_OF_ROWS = {
    "amax", "amin", "layer_norm", "linalg_norm", "linalg_vector_norm", "logsumexp", "mean", "norm",
    "normalize", "prod", "rms_norm", "softmax", "std", "sum", "var", "var_mean", "vector_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """Two things that must be equal. ``kinks``: also at the points where a condition changes."""

    what: str
    left: Any
    right: Any
    kinks: bool = True


def prove(pattern: Pattern, step: Callable[[str], None] = lambda _: None) -> list[str]:
    """Prove all claims of ``pattern``; returns them, one line each.

    ``step`` is called with each claim before its proof starts.

    Raises:
        PatternError: a claim is refuted or could not be proven; it shows the difference that is
            left. Or the pattern has no claim that can be proven.
    """
    proven = []
    for claim in claims(pattern):
        step(claim.what)
        rest = difference(claim.left, claim.right, kinks=claim.kinks)
        if rest is not None:
            raise PatternError(f"pattern {pattern.name}: {claim.what}: {rest}")
        proven.append(claim.what)
    if not proven:
        raise PatternError(
            f"pattern {pattern.name}: nothing to prove. Set example, so that the idioms are "
            "compared with the definition of the op"
        )
    return proven


def claims(pattern: Pattern) -> Iterator[Claim]:
    """All claims of ``pattern``.

    Raises:
        PatternError: an idiom cannot be traced or matched, or has other parameters than the
            meaning; a formula is missing.
    """
    functions = pattern.idioms if pattern.meaning is None else (pattern.meaning, *pattern.idioms)
    for function in dict.fromkeys(functions):
        _check_matchable(function, pattern)
    if pattern.meaning is not None:
        yield from _of_meaning(pattern)
    elif pattern.examples:
        yield from _of_op(pattern)


def _of_meaning(pattern: Pattern) -> Iterator[Claim]:
    assert pattern.meaning is not None
    signature = Signature(pattern.meaning)
    symbols = {name: sympy.Symbol(name, real=True) for name in signature.names}
    meaning = expression(pattern.meaning, symbols)
    for idiom in pattern.idioms:
        names = parameters(idiom)
        if set(names) != set(signature.names):
            raise PatternError(
                f"pattern {pattern.name}: idiom {idiom.__name__} takes {', '.join(names)}; the "
                f"meaning {pattern.meaning.__name__} takes {', '.join(signature.names)}"
            )
        if idiom is pattern.meaning:
            yield Claim(f"{idiom.__name__} has a formula", meaning, meaning)
            continue
        what = f"{idiom.__name__} = {pattern.meaning.__name__}"
        yield Claim(what, expression(idiom, symbols), meaning)
    if pattern.gradient is None:
        return
    dy = sympy.Symbol("dy", real=True)
    names = parameters(pattern.gradient)
    if len(names) != 1 + len(signature.names):
        raise PatternError(
            f"pattern {pattern.name}: gradient takes dy and then {', '.join(signature.names)}"
        )
    bound = dict(zip(names, (dy, *symbols.values()), strict=True))
    given = expression(pattern.gradient, bound)
    given = given if isinstance(given, (tuple, list)) else (given,)
    if len(given) != len(signature.tensors):
        raise PatternError(
            f"pattern {pattern.name}: gradient returns {len(given)} values, but must return one "
            f"for each of {', '.join(signature.tensors)}"
        )
    for name, have in zip(signature.tensors, given, strict=True):
        want = dy * sympy.diff(meaning, symbols[name])
        yield Claim(f"gradient with respect to {name}", have, want, kinks=False)


def _of_op(pattern: Pattern) -> Iterator[Claim]:
    """Each idiom against the definition of the op, on symbols in place of the examples' tensors."""
    definition = DEFINITIONS.get(pattern.op)
    if definition is None:
        raise PatternError(
            f"pattern {pattern.name}: {pattern.op} is not a semantic op of coda_inductor"
        )
    for idiom in pattern.idioms:
        for example in _fitting(pattern, idiom):
            given = {name: _symbols(name, example[name]) for name in parameters(idiom)}
            match, nodes = stand_in(given)
            arguments = [
                given[nodes[a]] if isinstance(a, Node) else a for a in pattern.arguments(match)
            ]
            means = definition.function(*arguments)
            means = means if pattern.result is None else means[pattern.result]
            has = _Idiom(torch.fx.symbolic_trace(idiom)).run(*given.values())
            if has.shape != means.shape:
                raise PatternError(
                    f"pattern {pattern.name}: {idiom.__name__} is {tuple(has.shape)}, and "
                    f"{pattern.op} {tuple(means.shape)}"
                )
            yield Claim(f"{idiom.__name__} = {pattern.op}", has.elements, means.elements)


def _fitting(pattern: Pattern, idiom: Callable[..., Any]) -> list[Mapping[str, Any]]:
    """The examples with all parameters of ``idiom``, of these the ones with the fewest others."""
    names = set(parameters(idiom))
    fitting = [e for e in pattern.examples if names <= set(e)]
    if not fitting:
        missing = names - set(pattern.examples[0])
        raise PatternError(
            f"pattern {pattern.name}: example has no {', '.join(sorted(missing))}, which idiom "
            f"{idiom.__name__} takes"
        )
    fewest = min(map(len, fitting))
    return [e for e in fitting if len(e) == fewest]


class _Idiom(torch.fx.Interpreter):
    """Runs an idiom; a norm in one call is over the last dimension, as for the matcher."""

    def run_node(self, n: Node) -> Any:
        canon = normalize(n) if n.op == "call_function" else None
        if canon is None or canon.op not in ("rms_norm", "layer_norm"):
            return super().run_node(n)
        x, *others = torch.fx.node.map_arg(canon.args, self.env.__getitem__)
        return getattr(torch, canon.op)(x, x.shape[-1:], *others)


def _symbols(name: str, example: Any) -> Any:
    """The value for a parameter: symbols for a tensor; integers and numbers unchanged."""
    if isinstance(example, Tensor):
        whole = not example.is_floating_point() and not example.is_complex()
        return example if whole else Exact.symbols(name, example.shape, example.dtype)
    return Exact.symbols(name, example) if isinstance(example, (tuple, list)) else example


def stand_in(given: Mapping[str, Any]) -> tuple[Match, dict[Node, str]]:
    """A match that binds parameters to the values in ``given``: numbers, and for each tensor a node
    of its shape and dtype. Also returns the parameter of each node."""
    graph, nodes, bound = Graph(), {}, dict(given)
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            node = graph.placeholder(name)
            node.meta["example_value"] = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="meta"
            )
            nodes[node], bound[name] = name, node
    return Match(next(iter(nodes), None), bound), nodes


def _numbers(pattern: Pattern) -> set[Any]:
    """The parameters that stand for numbers."""
    if pattern.meaning is not None:
        signature = Signature(pattern.meaning)
        return {*signature.names} - {*signature.tensors}
    given = [item for example in pattern.examples for item in example.items()]
    return {name for name, value in given if isinstance(value, (int, float))}


def _check_matchable(idiom: Callable[..., Any], pattern: Pattern) -> None:
    """An idiom that the matcher cannot read would never fire, silently."""
    numbers = _numbers(pattern)
    try:
        graph = torch.fx.symbolic_trace(idiom).graph
    except Exception as error:
        raise PatternError(
            f"idiom {idiom.__name__} cannot be traced: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(graph.output_node().args[0], Node):
        raise PatternError(f"idiom {idiom.__name__} must return one tensor")
    for node in graph.nodes:
        call = node.op in ("call_function", "call_method")
        if call and pattern.meaning is not None and target_name(node) in _OF_ROWS:
            raise PatternError(
                f"{idiom.__name__} computes {target_name(node)} of rows, and a meaning is of "
                "single elements. A norm x * scale * weight is written as "
                "Pattern.norm(name, scale, idioms): docs/patterns_for_models.md, 'A norm'"
            )
        read = {n.target if n.op == "placeholder" else None for n in node.all_input_nodes}
        alone = read and read <= numbers and target_name(node) != "neg"  # which the matcher reads
        if call and alone and idiom in pattern.idioms:
            raise PatternError(
                f"idiom {idiom.__name__} computes with numbers alone ({target_name(node)} of "
                f"{', '.join(sorted(map(str, read)))}), which is never found: Dynamo computes it "
                "and puts one number into the graph. Use that number as the parameter"
            )
        if call and normalize(node) is None:
            options = "".join(f", {key}={item}" for key, item in node.kwargs.items())
            raise PatternError(
                f"idiom {idiom.__name__} uses {target_name(node)}(...{options}), which the matcher "
                "cannot read: write it without in-place forms and unusual options"
            )
        if node.op == "placeholder" and not node.users:
            raise PatternError(f"idiom {idiom.__name__} does not use its parameter {node.target}")
