# SPDX-License-Identifier: Apache-2.0
"""The gradients around a deferred norm: its scale moves past the GEMMs of dn (rules R3, R4).

Before (x is M x d; one z = n @ W, dz its gradient, for every GEMM)::

    dn = sum of dz @ W.T;  dx, dgamma = norm_backward(dn, x, gamma, ...);  dW = n.T @ dz

After, where every dz is made in the epilogue of a GEMM (through SwiGLU)::

    zs = dz * scale;  dot = sum of rowsum(dz * z)         (both where dz is made)
    s = sum of zs @ W.T                                   one GEMM or several, its epilogue:
    dx = s * gamma - (scale**2 / d) * dot * bend * x
    dgamma = colsum(s * x)                                (partials)
    dW = h.T @ zs                                         h: as the forward stored it

and elsewhere (attention makes dz, or the caller) s = (sum of dz @ W.T) * scale, zs only for dW. A
dz that no kernel here can scale as it makes it, a caller's (logits) or one of columns, stays if h
is no wider: dW = (h * scale).T @ dz.

Why it is valid: with nh = x scale and p = dn gamma, ``norm_backward`` says
dx = scale (p - nh rowmean(p nh) bend), bend being a statistic of the norm's, or one (RMSNorm).
s = scale dn (R1). rowsum(p nh) = rowsum((dz W^T) n) = rowsum(dz (n W)) (R3), n W being z.
n = D_scale h, transposed and multiplied with dz, is dW (R4).

Rounding: zs and z are rounded to 16 bits. If one singular value of W dominates and dz is nearly
orthogonal to its direction, this error dominates dx: for a ratio of 1000 and an exact dz it is 40
times eager's. If a GEMM makes dz, eager rounds the GEMM's result and dz, and our error replaces
one of the same size. Otherwise dz is in memory and is read as it is.

If z is not available (a bias hides it, two GEMMs share a weight, nothing else would keep it until
then), or if no GEMM makes dz, the dot is the row sum of s * gamma * x. It is known only after the
GEMM, so that a kernel of Inductor computes dx.
"""

from torch.fx import Node

from coda_inductor.graph.edit import Put, prune, reorder
from coda_inductor.graph.gemms import gemm_inputs
from coda_inductor.graph.nodes import arguments, aten, bytes_of, fake, is_transpose, renames
from coda_inductor.graph.read import change
from coda_inductor.graph.sides import Scope, is_tangent
from coda_inductor.graph.walk import base, parts, readers
from coda_inductor.rewrite.norm.forward import Deferred, Product
from coda_inductor.rewrite.norm.uses import Uses
from coda_inductor.rewrite.recompute import NO_RECOMPUTE
from coda_inductor.semantic.columns import COLUMNS


def differentiate(uses: Uses, norm: Deferred, products: list[Product] | None, scope: Scope) -> None:
    """Rewrite the gradients of a norm whose forward pass has been rewritten already. ``products``:
    the GEMMs that follow, None if they cannot be distinguished."""
    # Is each product in memory in the backward pass anyway? Queries and keys are not, because
    # attention reads them with their positions.
    reads = [
        readers(z, lambda u: renames(u) or u.target is aten.permute.default)
        for z, _ in products or ()
    ]
    if any(all(user in scope.forward for user in users) for _, users in reads):
        products = None
    # Without the dot, a kernel after the dgrad finishes dx. It reads x, and makes h too.
    norm.h.all_input_nodes[0].meta[NO_RECOMPUTE] = products is not None
    wide, scaled = fake(norm.flat).dtype, dict[Node, Node]()

    def scale(dz: Node, reader: Node) -> Node:
        """``dz`` times the row scale, inserted once for ``reader`` and all other readers."""
        if (key := base(dz)) not in scaled:
            put = Put(reader)
            zs = put.mul(put.cast(dz, wide), norm.flat)
            scaled[key] = put.cast(zs, fake(dz).dtype)
        return scaled[key]

    old = [n for gemm in (*uses.wgrads, *uses.dgrads) for n in gemm.all_input_nodes]
    for wgrad, n_is_left in uses.wgrads.items():  # n.T @ dz, or dz.T @ n
        a, b = gemm_inputs(wgrad)
        dz = b if n_is_left else base(a, is_transpose)
        final = is_tangent(base(dz)) or base(dz).target is COLUMNS
        whole = final and bytes_of(dz) >= bytes_of(norm.h)
        h, zs = (scale(norm.h, wgrad), dz) if whole else (norm.h, scale(dz, wgrad))
        left, right = (h, zs) if n_is_left else (zs, h)
        change(wgrad, input=Put(wgrad).transpose(left), mat2=right)
    early = uses.early
    for dgrad in uses.dgrads if early else ():
        change(dgrad, input=scale(gemm_inputs(dgrad)[0], dgrad))
    if (backward := uses.backward) is not None:
        results = _gradients(backward, norm, early, products if early else None)
        for i, part in parts(backward).items():
            part.replace_all_uses_with(results[i])
        old += backward.users
    reorder(list(scaled.values()))  # a wgrad may stand before the dgrad, or after it
    prune(old)


def _gradients(
    backward: Node, norm: Deferred, early: bool, products: list[Product] | None
) -> dict[int, Node]:
    """The new results of ``backward``, by index. Only they are counted for the pattern: the scale
    and the row sums may be in an epilogue without them. ``early``: dz contains the row scale."""
    put = Put(backward, pattern=(f"{norm.name}_backward", backward.name))
    args, scale = arguments(backward), norm.statistics[0]
    s, x, gamma, needs = (args[name] for name in ("dy", "x", "weight", "needs"))
    wide = fake(scale).dtype
    s, x_wide = put.cast(s, wide), put.cast(x, wide)
    if not early:
        s = put.mul(s, scale)
    results: dict[int, Node] = {}
    if needs[0]:
        p = s if gamma is None else put.mul(s, put.cast(gamma, wide))
        dot = _dot(Put(backward), p, x_wide, norm, products)
        for bend in norm.statistics[1:]:
            dot = put.mul(dot, bend)
        slope = put.mul(put.mul(put.mul(scale, scale), dot), -1.0 / fake(x).shape[-1])
        results[0] = put.cast(put.add(p, put.mul(x_wide, slope)), fake(x).dtype)
    if needs[1]:
        results[1] = put.cast(put.column_sum(put.mul(s, x_wide)), fake(gamma).dtype)
    return results


def _dot(put: Put, p: Node, x: Node, norm: Deferred, products: list[Product] | None) -> Node:
    """rowsum(dn * gamma * nh), shaped like the scale: from products, or p = scale dn * gamma."""
    if products is None:
        return put.row_sum(put.mul(p, x))
    wide = fake(p).dtype
    terms = [put.mul(put.cast(dz, wide), put.cast(z, wide)) for z, dz in products]
    return put.reshape(_add_rows(put, terms), put.sizes(norm.statistics[0]))


def _add_rows(put: Put, matrices: list[Node]) -> Node:
    """The sum over all columns of all ``matrices``, (M, 1). Matrices of one width are added first,
    to need only one reduction."""
    widths: dict[int, Node] = {}
    for matrix in matrices:
        n = fake(matrix).shape[-1]
        widths[n] = put.add(widths[n], matrix) if n in widths else matrix
    total, *others = map(put.row_sum, widths.values())
    for other in others:
        total = put.add(total, other)
    return total
