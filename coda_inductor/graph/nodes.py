# SPDX-License-Identifier: Apache-2.0
"""The recorded values of aten nodes, and the kinds of nodes."""

import math
import operator
import re
from typing import Any

import torch
from torch.fx import Node

from coda_inductor.compat import schema, storage, unset_fake_temporarily
from coda_inductor.graph.read import kind, read
from coda_inductor.graph.sizes import hint, same
from coda_inductor.program.dtypes import FLOATS
from coda_inductor.semantic.define import WORDS

aten = torch.ops.aten
prims = torch.ops.prims

#: A part of an op's name -> the words for the op; the first match counts.
_WORDS = {
    "attention_backward": "the gradient of attention", "attention": "attention",
    "gemm_epilogue": "a fused GEMM", "grouped_mm": "a product of experts", "bmm": "a product",
    "addmm": "a product", "mm": "a product", "view": "a reshape", "reshape": "a reshape",
    "permute": "a transpose", "transpose": "a transpose", "clone": "a copy",
    "convert_element_type": "a cast",
}  # fmt: skip
#: Kinds of ops whose results have the same elements in the same order.
_NAMES = ("names", "detaches")
#: Meta key of the value that Dynamo records; AOTAutograd's is "val".
DYNAMO = "example_value"


def fake(node: Any) -> Any:
    """The fake value that torch recorded for a node, or None; other objects unchanged."""
    if not isinstance(node, Node):
        return node
    return node.meta[DYNAMO] if DYNAMO in node.meta else node.meta.get("val")


def bytes_of(*nodes: Any) -> int:
    """The total bytes of the tensors that are recorded for ``nodes``."""
    total = 0
    for value in map(fake, nodes):
        if isinstance(value, torch.Tensor):  # where a mask selects rows, numel() has no hint
            total += value.element_size() * math.prod(map(hint, value.shape))
        elif isinstance(value, (list, tuple)):
            total += bytes_of(*value)
    return total


def plain(*nodes: Any) -> list[Any] | None:
    """The values of ``nodes`` if all are recorded and are plain tensors; else None."""
    values = [fake(node) for node in nodes]
    return values if all(hasattr(value, "fake_mode") for value in values) else None


def is_view(node: Node, tensor: Any) -> bool:
    """Has ``node``, in any spelling, the memory, sizes and strides of ``tensor``?"""
    pair = fake(node), tensor
    if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in pair):
        return False
    left, right = ((*t.shape, *t.stride(), t.storage_offset()) for t in pair)
    same_memory = storage(pair[0]) == storage(tensor) and pair[0].dtype == tensor.dtype
    return same_memory and same(left, right)


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node that calls an op, by name."""
    call = read(node)
    assert call is not None, f"{node.name} is a call that its signature allows"
    return call.args


def constant(node: Node) -> float | None:
    """The number in a 0-dim constant tensor (from ``torch.where(c, x, 0.0)``, for example), as its
    dtype truncates, wraps or rounds it; None for others."""
    if node.target not in (aten.full.default, aten.scalar_tensor.default):
        return None
    args = arguments(node)
    if args.get("size"):
        return None
    number = args["s"] if "s" in args else args["fill_value"]
    if not isinstance(number, (int, float)) or fake(node).is_complex():
        return None
    with unset_fake_temporarily():
        try:
            return float(torch.full((), number, dtype=fake(node).dtype, device="cpu"))
        except RuntimeError:  # the dtype cannot hold it: the program itself will raise
            return None


def module_path(node: Node) -> str:
    """The dotted path of the module that ``node`` comes from, or an empty string."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, changed = str(list(stack.values())[-1][0]), 1
    while changed:  # torch.func.functional_call's
        path, changed = re.subn(r"getattr\(([^()]*), '(\w+)'\)", r"\1.\2", path)
    # Under a decorator of forward, the first of ``args`` is the module itself.
    path = re.sub(r"^L\['args'\]\[0\]\.?|^[LG]\['\w+'\]\.?|^L__self___", "", path)
    path = path.replace("__dict__['_modules']['", "_modules['")  # with a __getattr__ (peft)
    path = re.sub(r"_modules\['([^']*)'\]", r"\1", path)
    return re.sub(r"\['?([^]']*)'?\]", r".\1", path).lstrip(".")


def locate(node: Node) -> str:
    """The place of ``node`` in messages: its module's path, or its own name without one."""
    return module_path(node) or node.name


def words_for(node: Node) -> str:
    """The work of ``node`` in messages: "attention", "a reshape", or the name of its op."""
    if node.op != "call_function":
        return {"output": "the caller", "placeholder": "an input"}.get(node.op, node.op)
    name = getattr(node.target, "__name__", "").split(".")[0] or str(node.target)
    return next((words for part, words in (_WORDS | WORDS).items() if part in name), name)


def label(node: Node) -> str:
    """``node`` in messages: "attention in blocks.0.attn"; a product by its module alone."""
    path, words = module_path(node), words_for(node)
    return words if not path else path if words == "a product" else f"{words} in {path}"


def is_erased(node: Node) -> bool:
    """Was ``node`` erased from its graph? Then its neighbors no longer point to it."""
    return node.prev.next is not node


def row_major(tensor: torch.Tensor) -> bool:
    """Is ``tensor`` certainly contiguous? Kernels store rows; users' tensors keep their strides."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same(size, 1) and not same(stride, expected):
            return False
        expected = expected * (1 if same(size, 0) else size)
    return True


def renames(node: Any) -> bool:
    """Does ``node`` only rename its input: the same elements in the same order?"""
    return kind(node) in _NAMES


def converts(node: Any) -> bool:
    """Does ``node`` change the dtype of its input, and nothing else?"""
    if kind(node) != "casts":
        return False
    before, after = fake(node.all_input_nodes[0]), fake(node)
    return before.device == after.device and before.dtype != after.dtype  # else a copy to a device


def is_cast(node: Any) -> bool:
    """Does ``node`` convert between float types, and do nothing else?

    In a joint graph, a conversion from float64 to a narrower type does not count: programs of
    float64 GEMMs compute in float64 and do not round.
    """
    if kind(node) != "casts":
        return False
    before, after = fake(node.all_input_nodes[0]), fake(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.dtype not in FLOATS or after.dtype not in FLOATS or before.device != after.device:
        return False
    if DYNAMO in node.meta:
        return before.stride() == after.stride()
    return before.dtype not in (after.dtype, torch.float64)


def renames_or_casts(node: Any) -> bool:
    """Does ``node`` only rename its input, or change its dtype?"""
    return renames(node) or is_cast(node)


def is_transpose(node: Any) -> bool:
    """Does ``node`` swap the two dimensions of a matrix?"""
    permutes = isinstance(node, Node) and node.target is aten.permute.default
    return permutes and list(arguments(node)["dims"]) == [1, 0]


def axis_of(reduction: Node) -> str | None:
    """What a reduction folds, in its input's dtype: "row", the last dimension; "col", all others;
    None for other dimensions."""
    args, rank = arguments(reduction), fake(reduction.all_input_nodes[0]).dim()
    dims = args.get("dim", [-1])
    if not isinstance(dims, (list, tuple)) or args.get("dtype") is not None:
        return None
    axes = sorted(d % rank for d in dims) or [*range(rank)]  # no dims: all of them
    return "row" if axes == [rank - 1] else "col" if axes == [*range(rank - 1)] else None


def is_zeros(node: Any) -> bool:
    """Does ``node`` create a tensor of zeros?"""
    full = isinstance(node, Node) and node.target is aten.full.default
    return full and arguments(node)["fill_value"] == 0


def elementwise(node: Node) -> bool:
    """Is ``node`` computed element by element, by an aten op, a view or a semantic op?"""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or renames_or_casts(node)


def may_view(node: Node) -> bool:
    """May the result of ``node`` share memory with one of its inputs?"""
    if renames(node) or node.target is operator.getitem:
        return True
    op_schema = schema(node.target)
    return op_schema is not None and any(r.alias_info is not None for r in op_schema.returns)
