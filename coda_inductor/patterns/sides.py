# SPDX-License-Identifier: Apache-2.0
"""The two sides of a pattern's claims: an idiom, and the meaning or the semantic op.

Both are plain torch functions. ``compare`` runs them on numbers, ``prove`` on symbols.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from coda_inductor.errors import PatternError
from coda_inductor.graph.read import op_name
from coda_inductor.matching import Match, normalize
from coda_inductor.patterns.meaning import Signature
from coda_inductor.patterns.pattern import Pattern
from coda_inductor.semantic.define import DEFINITIONS, parameters

#: Functions of whole rows, which a norm may have and a meaning may not.
_ROW_FUNCTIONS = {
    "amax", "amin", "layer_norm", "linalg_norm", "linalg_vector_norm", "logsumexp", "mean", "norm",
    "normalize", "prod", "rms_norm", "softmax", "std", "sum", "var", "var_mean", "vector_norm",
}  # fmt: skip


def check_readable(pattern: Pattern) -> None:
    """Check names of parameters, and that the matcher reads each idiom. No values are needed.

    Raises:
        PatternError: an idiom cannot be traced or matched, or has other parameters than the
            meaning; the op is not a semantic op; it has no example.
    """
    functions = pattern.idioms if pattern.meaning is None else (pattern.meaning, *pattern.idioms)
    for function in dict.fromkeys(functions):
        _check_matchable(function, pattern)
    if pattern.meaning is None:
        if pattern.op not in DEFINITIONS:
            raise pattern.error(f"{pattern.op} is not a semantic op of coda_inductor")
        if not pattern.examples:
            raise pattern.error(
                "nothing to prove. Set example, so that the idioms are compared with the "
                "definition of the op"
            )
        return
    names = Signature(pattern.meaning).names
    for idiom in pattern.idioms:
        if {*parameters(idiom)} != {*names}:
            raise pattern.error(
                f"idiom {idiom.__name__} takes {', '.join(parameters(idiom))}; the meaning "
                f"{pattern.meaning.__name__} takes {', '.join(names)}"
            )
    if pattern.gradient is not None and len(parameters(pattern.gradient)) != 1 + len(names):
        raise pattern.error(f"gradient takes dy and then {', '.join(names)}")


def gradient_tuple(pattern: Pattern, gradients: Any) -> tuple[Any, ...]:
    """The results of the author's gradient, as a tuple.

    Raises:
        PatternError: there is not one gradient for each tensor.
    """
    assert pattern.meaning is not None
    tensors = Signature(pattern.meaning).tensors
    gradients = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
    if len(gradients) != len(tensors):
        each = ", ".join(tensors)
        why = f"gradient returns {len(gradients)} values, but must return one for each of {each}"
        raise pattern.error(why)
    return tuple(gradients)


def against_op(
    pattern: Pattern, new: Callable[[str, Sequence[int], torch.dtype], Any]
) -> Iterator[tuple[Callable[..., Any], dict[str, Any], Any, Any]]:
    """(idiom, values of its parameters, result of the idiom, result of the op) for the examples of
    each idiom. ``new`` makes a tensor for a parameter, given its name, a shape and a dtype."""
    for idiom in pattern.idioms:
        for example in _fitting(pattern, idiom):
            inputs = {name: _input(name, example[name], new) for name in parameters(idiom)}
            match, nodes = _stand_in(inputs)
            arguments = pattern.arguments(match)
            arguments = [inputs[nodes[a]] if isinstance(a, Node) else a for a in arguments]
            right = DEFINITIONS[pattern.op].function(*arguments)
            right = right if pattern.result is None else right[pattern.result]
            left = _Idiom(torch.fx.symbolic_trace(idiom)).run(*inputs.values())
            if left.shape != right.shape:
                have, want = tuple(left.shape), tuple(right.shape)
                raise pattern.error(f"{idiom.__name__} is {have}, and {pattern.op} {want}")
            yield idiom, inputs, left, right


def _input(name: str, example: Any, new: Callable[..., Any]) -> Any:
    """The value for a parameter: new for a floating tensor; integers and numbers unchanged."""
    if isinstance(example, Tensor):
        real = example.is_floating_point() or example.is_complex()
        return new(name, example.shape, example.dtype) if real else example
    is_shape = isinstance(example, (tuple, list))
    return new(name, example, torch.float64) if is_shape else example


def _fitting(pattern: Pattern, idiom: Callable[..., Any]) -> list[Mapping[str, Any]]:
    names = set(parameters(idiom))
    examples = [e for e in pattern.examples if names <= set(e)]
    if not examples:
        missing = ", ".join(sorted(names - set(pattern.examples[0])))
        raise pattern.error(f"example has no {missing}, which idiom {idiom.__name__} takes")
    fewest = min(map(len, examples))
    return [e for e in examples if len(e) == fewest]


class _Idiom(torch.fx.Interpreter):
    """Runs an idiom. A norm written as one call is over the last dimension, as in the matcher."""

    def run_node(self, n: Node) -> Any:
        call = normalize(n) if n.op == "call_function" else None
        if call is None or call.op != "rms_norm":
            return super().run_node(n)
        kwargs = dict(torch.fx.node.map_arg(call.args, self.env.__getitem__))
        return torch.rms_norm(normalized_shape=kwargs["input"].shape[-1:], **kwargs)


def _stand_in(inputs: Mapping[str, Any]) -> tuple[Match, dict[Node, str]]:
    """A match that binds each parameter to its number, or to a node with the shape and dtype of its
    tensor. Returns the match and the parameter of each node."""
    graph, nodes, bound = Graph(), {}, dict(inputs)
    for name, tensor in inputs.items():
        if isinstance(tensor, Tensor):
            node = graph.placeholder(name)
            node.meta["example_value"] = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="meta"
            )
            nodes[node], bound[name] = name, node
    return Match(next(iter(nodes), None), bound), nodes


def _numbers(pattern: Pattern) -> set[Any]:
    if pattern.meaning is not None:
        signature = Signature(pattern.meaning)
        return {*signature.names} - {*signature.tensors}
    items = [item for example in pattern.examples for item in example.items()]
    return {name for name, value in items if isinstance(value, (int, float))}


def _check_matchable(idiom: Callable[..., Any], pattern: Pattern) -> None:
    """Raise if the matcher cannot read an idiom, which would otherwise never fire, silently."""
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
        if call and pattern.meaning is not None and op_name(node) in _ROW_FUNCTIONS:
            raise PatternError(
                f"{idiom.__name__} computes {op_name(node)} of rows, and a meaning is of "
                "single elements. A norm x * scale * weight is written as "
                "Pattern.norm(name, scale, idioms): docs/internals/patterns_for_models.md, 'A norm'"
            )
        read = {n.target if n.op == "placeholder" else None for n in node.all_input_nodes}
        alone = read and read <= numbers and op_name(node) != "neg"  # which the matcher reads
        if call and alone and idiom in pattern.idioms:
            raise PatternError(
                f"idiom {idiom.__name__} computes with numbers alone ({op_name(node)} of "
                f"{', '.join(sorted(map(str, read)))}), which is never found: Dynamo computes it "
                "and puts one number into the graph. Use that number as the parameter"
            )
        if call and normalize(node) is None:
            options = "".join(f", {key}={item}" for key, item in node.kwargs.items())
            raise PatternError(
                f"idiom {idiom.__name__} uses {op_name(node)}(...{options}), which the matcher "
                "cannot read: write it without in-place forms and unusual options"
            )
        if node.op == "placeholder" and not node.users:
            raise PatternError(f"idiom {idiom.__name__} does not use its parameter {node.target}")
