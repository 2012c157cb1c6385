# SPDX-License-Identifier: Apache-2.0
"""Linear layers of an unmodified model in FP8: ``options={"fp8": RECIPE}``.

Before (a layer's three products)::

    y = x @ W.T;  dx = dy @ W;  dW = dy.T @ x

After, by the recipe (``recipes``), for each of them::

    q, s = quantize(x, [1], ...); r, t = quantize(W, [1], ...); y = scaled_mm(q, r.T, 1 / s, 1 / t)

These are the nodes that torchao's own modules become (``raising``): the numbers are torchao's, and
everything that follows is the same. Equal quantizations of one pass are one node.

Not valid: FP8 has 3 or 2 bits of mantissa. It is what the option asks for.

Refuses layers that ``options["fp8_skip"]`` names, such that are too small to gain
(``recipes.too_small``; ``options["fp8_small"]`` takes them), features that are no multiples of 16,
weights that are no nn.Linear's (GPT-2's Conv1D: torchao knows none either) or are computed,
products in another dtype than bfloat16, and inputs without rows (an expert that no token chose). A
product with what the caller hands over is no layer. The two gradients of a layer follow its forward
product; that of its weight, which sums over rows, stays in bfloat16 where M is no multiple of 16.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.edit import Put
from coda_inductor.graph.gemms import WEIGHT_GRADIENT, bias_of, gemm_inputs, plain_bias
from coda_inductor.graph.nodes import aten, fake, is_transpose, of_linear, place, renames_or_casts
from coda_inductor.graph.sides import Scope, checkpoint
from coda_inductor.graph.sizes import at_least_one, same
from coda_inductor.graph.walk import base
from coda_inductor.options import Options
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.report import Float8Layers
from coda_inductor.rewrite.fp8.chains import is_fp8
from coda_inductor.rewrite.fp8.merge import origin
from coda_inductor.rewrite.fp8.recipes import MULTIPLE, RECIPES, Recipe, Role, too_small
from coda_inductor.semantic.fp8 import quantize, scaled_mm

_PRODUCTS = (aten.mm.default, aten.addmm.default)

#: What peft calls a layer that it wraps, behind the layer's own name.
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)$")


@dataclass(frozen=True)
class Linear:
    """A forward product: its node, what its weight comes from, whether that is one, and whether it
    is that of a layer which is quantized."""

    node: Node
    weight: Node
    layer: bool
    chosen: bool


def quantize_linears(graph: Graph, record: Record) -> None:
    """Apply the rewrite, in place, where ``options["fp8"]`` asks for it. Each forward product
    counts, or has its reason."""
    if not record.options.fp8 or not record.enabled("fp8_linear"):
        return
    scope, products = Scope(graph), [n for n in graph.nodes if n.target in _PRODUCTS]
    linears = [found for n in products if (found := _linear(n, scope, record)) is not None]
    # Before the first change: a layer's input may be another one's product.
    gradients = [(node, *_gradient_role(node, linears, scope)) for node in products]
    put = _Quantizer(graph, RECIPES[record.options.fp8], scope)
    for linear in linears:
        if linear.chosen:
            put(linear.node, Role.FORWARD, gradient=None)
            record.fire("fp8_linear")
    for node, role, graded in gradients:
        why = _odd({"M": fake(node.args[0]).shape[1]}) if role is Role.WEIGHT_GRADIENT else None
        if why is not None and Role.WEIGHT_GRADIENT in put.recipe.vectors:
            record.refuse("fp8_linear", place(node), why.within("its weight's gradient: {}"))
        elif role is not None:
            put(node, role, gradient=graded)
    graph.eliminate_dead_code()
    record.report.float8.add(_said(linears, record.options))


def skips(pattern: str, path: str) -> bool:
    """Does ``pattern``, one of ``options["fp8_skip"]``, name the layer at ``path``? It may leave
    out first parts of the path, and what peft puts behind it."""
    names = {path, _WRAPPED.sub("", path)}
    parts = [name.split(".") for name in names]
    ends = {".".join(part[i:]) for part in parts for i in range(len(part))}
    return any(fnmatch.fnmatchcase(end, pattern) for end in ends)


def _said(linears: list[Linear], options: Options) -> Float8Layers:
    """What became of the layers, for the report."""
    layers = [linear for linear in linears if linear.layer]
    chosen = {place(linear.node) for linear in layers if linear.chosen}
    kept = {place(linear.node) for linear in layers} - chosen
    named = {p for p in options.fp8_skip if any(skips(p, path) for path in chosen | kept)}
    own = options.fp8_skip if options.fp8_skip != Options.fp8_skip else ()
    return Float8Layers(options.fp8, own, chosen, kept, named)


def _root(node: Node) -> Node:
    """What ``node`` is a view, a transpose or a cast of."""
    return base(node, lambda n: renames_or_casts(n) or is_transpose(n))


def _linear(node: Node, scope: Scope, record: Record) -> Linear | None:
    """The product ``node``, if it is one of the forward pass."""
    x, weight = gemm_inputs(node)
    if x in scope.graded or weight in scope.graded:
        return None
    root = _root(weight)
    given = root.op in ("placeholder", "get_attr") and fake(root).dim() == 2
    ours = any(map(is_fp8, root.all_input_nodes))  # a region's body, expanded before
    if ours or (not of_linear(node) and not (given and _kept(root, record))):
        return Linear(node, root, layer=False, chosen=False)
    computed = refuse("fp8-computed", f"its weight is computed, by {root.target}")
    why = _refusal(node, record) if given else computed
    if why is not None and why.at("fp8_linear", place(node)) not in record.report.refusals:
        record.refuse("fp8_linear", place(node), why)  # once: Inductor hands regions in again
    return Linear(node, root, layer=True, chosen=why is None)


def _kept(root: Node, record: Record) -> bool:
    """Is the input ``root`` of a graph a parameter? What the caller hands over, be it another
    graph's result, is multiplied in no linear layer, unless a module says so."""
    return getattr(root.meta.get("desc"), "idx", None) not in record.tensors


def _refusal(node: Node, record: Record) -> Refusal | None:
    options, weight, path = record.options, gemm_inputs(node)[1], place(node)
    for pattern in options.fp8_skip:
        if skips(pattern, path):
            return refuse("fp8-skipped", f"options['fp8_skip'] has {pattern!r}")
    if not is_transpose(weight):
        text = "its weight is (K, N), as no nn.Linear's is"
        return refuse("fp8-weight", text)
    if fake(node).dtype != torch.bfloat16:
        return refuse("fp8-dtype", f"it multiplies {fake(node).dtype}, not bfloat16")
    k, n = fake(weight).shape
    if (why := _odd({"N": n, "K": k})) is not None:
        return why
    if too_small(options.fp8, n, k) and not options.fp8_small:
        text = f"N={n}, K={k} is too small to gain from {options.fp8}"
        return refuse("fp8-small", text)
    if (why := _no_rows(fake(node).shape[0], RECIPES[options.fp8])) is not None:
        return why
    if bias_of(node) is not None and not plain_bias(node):
        return refuse("bias-form", "its bias or alpha/beta is not supported")
    return None


def _no_rows(rows: Any, recipe: Recipe) -> Refusal | None:
    """Why a product of so many rows is none, or None: nothing at all has no maximum."""
    if same(rows, 0):
        return refuse("empty", "it multiplies no rows")
    if all(recipe.vectors[Role.FORWARD]) or at_least_one(rows):
        return None
    return refuse("fp8-rows", f"M={rows} may be 0, and a tensor without elements has no maximum")


def _odd(sizes: dict[str, Any]) -> Refusal | None:
    """Why FP8 does not multiply these sizes, or None."""
    for name, size in sizes.items():
        if not isinstance(size, int):
            return refuse("symbolic-features", f"{name} is symbolic")
        if size % MULTIPLE:
            return refuse("not-multiple-of-16", f"{name}={size} is no multiple of {MULTIPLE}")
    return None


def _gradient_role(
    node: Node, linears: list[Linear], scope: Scope
) -> tuple[Role | None, int | None]:
    """Which gradient of a quantized one of ``linears`` ``node`` makes, and which of its factors is
    one; None for other products. Autograd numbers a product and its gradients alike, and what it
    does not differentiate as the op before."""
    graded = [x in scope.graded for x in gemm_inputs(node)]
    if node.target is not aten.mm.default or sum(graded) != 1:
        return None, None
    other, number = gemm_inputs(node)[graded.index(False)], node.meta.get("seq_nr")
    alike = (n for n in linears if number is not None and n.node.meta.get("seq_nr") == number)
    linear = next(alike, None)
    if linear is None or not linear.chosen:
        return None, None
    weight = _root(other) is linear.weight
    return Role.INPUT_GRADIENT if weight else Role.WEIGHT_GRADIENT, graded.index(True)


class _Quantizer:
    """Puts a scaled product in place of a product; what is quantized alike is so once."""

    def __init__(self, graph: Graph, recipe: Recipe, scope: Scope):
        self.graph, self.recipe, self.scope = graph, recipe, scope
        self.known: dict[tuple, tuple[Node, Node]] = {}

    def __call__(self, node: Node, role: Role, gradient: int | None) -> None:
        """``gradient``: which factor is one, 0 or 1; None for neither."""
        vectors = self.recipe.vectors.get(role)
        if vectors is None:
            return
        if gradient == 1:
            vectors = vectors[::-1]
        fast = role is Role.FORWARD
        put = Put(self.graph, like=node)
        with self.graph.inserting_before(node):
            pairs = [self._factor(put, node, i, vectors[i], graded=i == gradient) for i in range(2)]
            (a, inv_a), (b, inv_b) = pairs
            after = all(vectors) and not fast
            new = put(scaled_mm, a, b, inv_a, inv_b, fake(node).dtype, fast, after)
            if role is Role.WEIGHT_GRADIENT:
                new.meta[WEIGHT_GRADIENT] = True
            if (bias := bias_of(node)) is not None:
                new = put.add(new, bias)
        node.replace_all_uses_with(new)

    def _factor(
        self, put: Put, node: Node, index: int, vector: bool, *, graded: bool
    ) -> tuple[Node, Node]:
        """(the factor in FP8, the reciprocal of its scale)."""
        x = gemm_inputs(node)[index]
        turned = is_transpose(x)
        source = x.args[0] if turned else x
        # Of a left factor rows have scales of their own, of a right one columns.
        dims = [int((index == 0) != turned)] if vector else []
        dtype = self.recipe.gradient if graded else torch.float8_e4m3fn
        pass_ = (node in self.scope.forward, checkpoint(node))
        key = (origin(source), str(fake(source).shape[-1]), tuple(dims), dtype, pass_)
        if key not in self.known:
            both = put(quantize, source, dims, dtype, self.recipe.power_of_two)
            q, scale = (put(operator.getitem, both, i) for i in range(2))
            self.known[key] = q, put(aten.reciprocal.default, scale)
        q, inverse = self.known[key]
        if vector:
            inverse = put.reshape(inverse, [-1, 1] if index == 0 else [1, -1])
        return put.transpose(q) if turned else q, inverse
