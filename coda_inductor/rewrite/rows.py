# SPDX-License-Identifier: Apache-2.0
"""A residual stream that does not lie row by row is copied once, where it begins.

Before (patches of a picture, whose channels a convolution makes; or sequences beside each other)::

    x = permute(flatten(conv(picture)), [0, 2, 1])               # strides (.., 1, N)
    x = permute(x, [1, 0, 2])                                    # or strides (D, T D, 1)
    x = x + a @ Wa;  x = x + b @ Wb;  ...                        # strides as the first x has them

After::

    x = clone(permute(...), memory_format=torch.contiguous_format)
    x = x + a @ Wa;  x = x + b @ Wb;  ...                        # row by row

Why it is valid: no value changes, and strides are recorded anew for all that is computed from x.

What it enables: epilogues store results row by row, so that they cannot compute such sums.

Leaves alone: tensors that fewer than two norms read, because a copy would not pay; slices; inputs
that are written to. Refuses streams whose strides somebody sees.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from coda_inductor.graph.aliases import WRITTEN
from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.layout import relay
from coda_inductor.graph.nodes import arguments, aten, fake, is_cast, row_major
from coda_inductor.graph.sizes import same
from coda_inductor.graph.walk import base
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal
from coda_inductor.semantic.norms import NORMS


def lay_out_rows(graph: Graph, record: Record) -> None:
    """Copy the streams of an aten graph that norms read, in place."""
    for start, times in Counter(map(_start, _normalized(graph))).items():
        if start is not None and times > 1 and (why := _copy(start)) is not None:
            record.refuse("rows", start, why)


def _normalized(graph: Graph) -> Iterator[Node]:
    """The inputs of norms. LayerNorms are decomposed already, behind a copy that lies in rows."""

    def passes(node: Node) -> bool:
        return is_cast(node) or node.target is aten.clone.default

    for node in graph.nodes:
        if node.target in NORMS:
            yield arguments(node)["x"]
        elif node.target is aten.var_mean.correction:
            x, dims = (arguments(node)[name] for name in ("input", "dim"))
            if dims == [fake(x).dim() - 1]:
                yield base(x, passes)


def _start(x: Node | None) -> Node | None:
    """The transpose or input whose strides ``x`` has, if these are no rows; else None."""
    while x is not None and not row_major(fake(x)) and not _begins(x):
        inputs = [n for n in x.all_input_nodes if isinstance(fake(n), torch.Tensor)]
        alike = (n for n in inputs if same(fake(n).shape, fake(x).shape) and not row_major(fake(n)))
        x = next(alike, None)
    if x is None or row_major(fake(x)):
        return None
    # Kernels read a slice in place, and sums with one lie in rows.
    sizes = zip(fake(x).shape, fake(x).stride(), strict=True)
    return x if same(1 + sum((n - 1) * stride for n, stride in sizes), fake(x).numel()) else None


def _begins(x: Node) -> bool:
    """Is ``x`` a transpose, or an input that nothing writes to? A copy would be written instead."""
    if x.op != "placeholder":
        return x.target is aten.permute.default
    return not x.meta.get(WRITTEN)


def _copy(start: Node) -> Refusal | None:
    """Copy ``start``, or return the reason why its strides must stay."""
    first = start.next
    while first.op == "placeholder":
        first = first.next
    put = Put(start, first)
    copy = put(aten.clone.default, start, memory_format=torch.contiguous_format)
    why = relay(start, copy)
    prune([copy])  # if nobody reads it
    return why
