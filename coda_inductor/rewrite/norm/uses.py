# SPDX-License-Identifier: Apache-2.0
"""The readers of a norm: GEMMs, and in training the norm's gradient and the weights' gradients.

A linear layer z = n @ W gives three nodes: ``mm(n, W)`` in the forward pass, and in the backward
pass ``mm(dz, W.T)``, one term of the gradient of n, and ``mm(n.T, dz)`` or ``mm(dz.T, n)``, the
gradient of W. All of n's readers must be of these kinds.
"""

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from coda_inductor.graph.gemms import DENSE, bias_of, gemm_inputs, producer, terms
from coda_inductor.graph.nodes import (
    arguments,
    aten,
    fake,
    is_transpose,
    label,
    renames,
    renames_or_casts,
)
from coda_inductor.graph.sides import Scope
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base, chain, consumer, parts, readers
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.semantic.experts import grouped_mm
from coda_inductor.semantic.norms import NORMS


@dataclass
class Uses:
    """The readers of one norm.

    Attributes:
        gemms: ``mm`` and ``addmm`` nodes of the forward pass that read the normalized n as A.
        wgrads: ``mm`` nodes that compute a weight's gradient -> is n (transposed) their A? Else it
            is their B.
        backward: the norm's own backward node, if a gradient is wanted.
        dgrads: the ``mm`` nodes whose sum is the gradient of n.
    """

    gemms: list[Node] = field(default_factory=list)
    wgrads: dict[Node, bool] = field(default_factory=dict)
    backward: Node | None = None
    dgrads: list[Node] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the GEMMs read the norm."""
        return fake(gemm_inputs(self.gemms[0])[0]).dtype

    @property
    def early(self) -> bool:
        """Does a GEMM compute every dz, so that its epilogue can scale it? False if other products
        (adapters) read dz too, because it would be stored twice."""
        products = {*self.dgrads, *self.wgrads}
        for dz in (gemm_inputs(dgrad)[0] for dgrad in self.dgrads):
            _, users = readers(base(dz), lambda n: renames(n) or is_transpose(n))
            if producer(dz) is None or any(u.target in DENSE and u not in products for u in users):
                return False
        return True

    def gradients(self) -> dict[Node, Node] | None:
        """Forward GEMM -> the gradient dz of its product z, for every GEMM whose product has one.
        None if they cannot be distinguished (a weight is used twice), or if a bias hides z."""
        by_gemm: dict[Node, Node] = {}
        for dgrad in self.dgrads:
            dz, weight = gemm_inputs(dgrad)
            matrix, transposed = _matrix(weight)
            target = (matrix, not transposed)
            same_weight = [g for g in self.gemms if _matrix(gemm_inputs(g)[1]) == target]
            if len(same_weight) != 1 or same_weight[0] in by_gemm:
                return None
            (gemm,) = same_weight
            if gemm.target is not aten.mm.default or not same(fake(gemm).shape, fake(dz).shape):
                return None
            by_gemm[gemm] = dz
        return by_gemm


def uses(norm: Node, scope: Scope) -> Uses | Refusal:
    """The readers of a norm's node, or the reason why it cannot be deferred."""
    outputs = parts(norm)
    if 0 not in outputs:
        return refuse("no-neighbours", "its result is not read")
    result = Uses()
    statistics = [output for i, output in outputs.items() if i > 0]
    why = _readers(outputs[0], scope, result) or _gradient(norm, statistics, result)
    if why is not None:
        return why
    dtypes = {fake(gemm_inputs(g)[0]).dtype for g in (*result.gemms, *result.wgrads)}
    if len(dtypes) > 1:
        return refuse("norm-gemm-dtypes", "its GEMMs run in different dtypes")
    result.gemms.sort()
    return result


def _readers(output: Node, scope: Scope, result: Uses) -> Refusal | None:
    width = fake(output).shape[-1]
    todo = [output]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.target in DENSE and [*gemm_inputs(user), bias_of(user)].count(node) > 1:
                return refuse("no-gemm", f"{label(user)} reads it twice")
            if user.target in DENSE and gemm_inputs(user)[0] is node and user in scope.forward:
                result.gemms.append(user)
            elif _is_wgrad(user, node):
                result.wgrads[user] = False
            elif is_transpose(user) and all(_is_wgrad(u, user) for u in user.users):
                result.wgrads |= dict.fromkeys(user.users, True)
            elif renames_or_casts(user):
                if not same(fake(user).shape[-1], width):
                    return refuse("norm-reshaped", f"{label(user)} changes its rows")
                todo.append(user)
            elif user.target is grouped_mm:
                return refuse("norm-experts", "experts read its rows")
            else:
                linear = any(other.target in DENSE for other in readers(output)[1])
                others = "not only linear layers" if linear else "no linear layer does"
                reader = consumer(user)
                part = reader.target in DENSE  # behind a view that no product can read
                text = f"{label(reader)} reads {'a part of it' if part else f'it, {others}'}"
                return refuse("norm-read-elsewhere", text)
    return None


def _matrix(node: Node) -> tuple[Node, bool]:
    turns = chain(node, is_transpose)
    return turns[-1], len(turns) % 2 == 0


def _is_wgrad(user: Node, node: Node) -> bool:
    """Is ``user`` mm(n.T, dz) for node = n.T, or mm(dz.T, n) for node = n?"""
    if user.target is not aten.mm.default:
        return False
    left, right = gemm_inputs(user)
    return left is node if is_transpose(node) else right is node and is_transpose(left)


def _gradient(norm: Node, statistics: list[Node], result: Uses) -> Refusal | None:
    readers = list(dict.fromkeys(user for output in statistics for user in output.users))
    if not readers:
        return None
    (result.backward, *others) = readers
    if others or result.backward.target is not NORMS[norm.target].backward:
        return refuse("no-gemm", "its statistics are read")
    gradient = arguments(result.backward)["dy"]
    result.dgrads = terms(gradient) or []
    if not result.dgrads:
        return refuse("norm-gradient", "its gradient is not a sum of GEMMs")
    if len(gradient.users) != 1:
        return refuse("norm-gradient", "its gradient is read elsewhere")
    return None


def input_refusal(norm: Node, scope: Scope, record: Record) -> Refusal | None:
    """The reason why no epilogue computes the statistics of ``norm``, or None. An epilogue that
    does computes the GEMMs' operand as well, and the norm has no kernel. A kernel of Inductor's
    that computes x would stay, and move as many bytes."""
    x, sites = arguments(norm)["x"], record.sites
    source = producer(x)
    if source is None:
        return refuse("norm-input-no-gemm", "its input is not made by a GEMM")
    if (why := sites.refusal(source)) is not None:
        return why.within(f"{label(source)}, which makes its input, is not fused: {{}}")
    if not sites.absorbs(source, x, scope):
        return refuse(
            "norm-input-elsewhere", f"an op between {label(source)} and it cannot be in an epilogue"
        )
    return None
