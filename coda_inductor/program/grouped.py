# SPDX-License-Identifier: Apache-2.0
"""Products of each row with the B of its group, in plain torch."""

import itertools

import torch
from torch import Tensor

from coda_inductor.compat import grouped_mm

_LIBRARY = torch.library.Library("coda_inductor", "FRAGMENT")
_LIBRARY.define(
    "grouped_plain(Tensor a, Tensor b, Tensor groups) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def grouped_product(
    a: Tensor, b: Tensor, groups: Tensor, index: Tensor | None, wide: torch.dtype
) -> Tensor:
    """Row i of the result, (M, N), is row i of ``a`` (R, K), or row index[i], times b[e] of ``b``
    (E, K, N). Row i is in group e: from groups[e] to groups[e + 1], (E + 1,) int32. Computed in
    ``wide``; rows without a group are arbitrary."""
    a = (a if index is None else a[index]).to(wide)
    if wide == torch.bfloat16:
        return grouped_mm(a, b.to(wide), groups[1:])
    return torch.ops.coda_inductor.grouped_plain(a, b.to(wide), groups)


def group_of(groups: Tensor, m: int) -> Tensor:
    """The group of each of ``m`` rows, (m,) int64; the last group for rows without one."""
    rows = torch.arange(m, device=groups.device, dtype=groups.dtype)
    return (rows[:, None] >= groups[None, 1:-1]).sum(1)


def _plain(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    """The result of ``torch._grouped_mm``, which in a graph takes only bfloat16."""
    out = a.new_zeros(a.shape[0], b.shape[2])
    for e, (start, end) in enumerate(itertools.pairwise(groups.tolist())):
        out[start:end] = a[start:end] @ b[e]
    return out


@torch.library.register_fake("coda_inductor::grouped_plain", lib=_LIBRARY)
def _fake(a, b, groups):  # noqa: ARG001 (the op's signature)
    return a.new_empty(a.shape[0], b.shape[2])


_LIBRARY.impl("grouped_plain", _plain, "CompositeExplicitAutograd")
