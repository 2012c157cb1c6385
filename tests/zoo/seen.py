# SPDX-License-Identifier: Apache-2.0
"""Programs that passes would lay out anew, each with a second reader of the same tensor: the reader
sees memory as it lies, or reads elements and sees nothing."""

import torch
import torch.nn.functional as F

D, B, T = 32, 4, 8
_LIBRARY = torch.library.Library("coda_tests", "FRAGMENT")


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,)) * 2


for _name, _tag in {
    "ordered": torch.Tag.needs_fixed_stride_order, "exact": torch.Tag.needs_exact_strides,
}.items():  # fmt: skip
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor", tags=(_tag,))
    _LIBRARY.impl(_name, _in_memory, "CPU")
    torch.library.register_fake(f"coda_tests::{_name}", lambda x: x.new_empty(x.numel()))

#: Readers that see memory. They take what any tensor of the programs may be.
SEEING = {
    "as_strided": lambda x: x.as_strided((4, 6), (7, 1)) * 2,
    "as_strided_copy": lambda x: torch.as_strided_copy(x, (4, 6), (7, 1)),
    "as_strided of a view": lambda x: x.transpose(0, -1).as_strided((5, 4), (3, 1)) * 2,
    "as_strided of a result": lambda x: (x * 2).as_strided((4, 6), (7, 1)) * 2,
    "ordered": lambda x: torch.ops.coda_tests.ordered(x.detach()),
    "exact": lambda x: torch.ops.coda_tests.exact(x.detach()),
    "returned": lambda x: x,
    "a returned view": lambda x: x[1:],
}
#: Readers of elements.
BLIND = {
    "elements": lambda x: x.sin(),
    "a transpose": lambda x: x.transpose(0, 1).exp().sum(0),
    "a reshape": lambda x: x.reshape(-1).cumsum(0),
    "a copy": lambda x: x.clone(memory_format=torch.contiguous_format) * 2,
}


def stream(read):
    """``rows`` copies x, which lies (B, T, D) under (T, B, D)."""

    def function(x, w, v):
        x = x.permute(1, 0, 2)
        y = x + F.linear(F.layer_norm(x, (D,)), w)
        y = y + F.linear(F.layer_norm(y, (D,)), v)
        return F.linear(F.layer_norm(y, (D,)), w).sum(0), read(y)

    return function


def halves(read):
    """``packed`` makes g and u, halves of one product, two products."""

    def function(x, w, v):
        g, u = F.linear(x, torch.cat([w, v])).chunk(2, -1)
        return F.linear(F.silu(g) * u, w), read(g)

    return function


def terms(read):
    """``fuse`` joins the left factors of a sum of products of unequal K."""

    def function(x, w, v):
        x = x.reshape(-1, D)
        a = x.sin()
        y = F.linear(a, w) + F.linear(x[:, : D // 2].cos(), v[:, : D // 2])
        return y.relu(), read(a)

    return function


PROGRAMS = {"rows": stream, "packed": halves, "fuse": terms}


def arguments(requires_grad: bool = False) -> list[torch.Tensor]:
    shapes = (B, T, D), (D, D), (D, D)
    return [torch.randn(s, dtype=torch.float64).requires_grad_(requires_grad) for s in shapes]
