# SPDX-License-Identifier: Apache-2.0
"""A mask's blocks, computed inside the graph, and the call of FlexAttention that uses them.

Before::

    sdpa(q, k, v, attn_mask=mask)                            # mask: (B or 1, 1, Tq, Tk), bool

After::

    plane = mask[:, 0]                                       # or mask[0, 0]
    lists = block_lists(plane)                               # once, however many calls read it
    flex_attention(q, k, v, block_mask=(lists, lambda b, h, i, j: plane[b, i, j]))[0]

A block is 128 queries by 128 keys. Empty blocks are in no list, so they are not computed; in full
blocks the mask is not read. ``flex_attention`` is torch's own operator as Dynamo records it: with
functions as graphs, and a ``BlockMask`` as a tuple of its parts.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node, symbolic_trace

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import fake
from coda_inductor.graph.sizes import hint, same_strides

#: Queries and keys of a block. The kernels' tiles divide it.
BLOCK = 128
#: The kernel options that ``flex_attention`` sets itself, and ``BACKEND``, so that the kernel for
#: decoding is never chosen.
OPTIONS = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
#: The kernels' tiles for heads of 64 values, measured on an H200 (gotchas.md): at all other
#: widths torch's own choice was best.
WIDTH_64 = {
    "fwd_BLOCK_N": 64,
    **{f"bwd_BLOCK_{size}": 64 for size in ("M1", "N1", "M2", "N2")},
    "bwd_num_stages": 3,
    "bwd_num_warps": 4,
}
#: Parts of a BlockMask, in the order of ``block_lists``.
_PARTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
          "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")  # fmt: skip


def block_lists(plane: Tensor, batched: bool) -> tuple[Tensor, ...]:
    """The blocks of a boolean mask that are not empty.

    Args:
        plane: the mask, (queries, keys), or (batch, queries, keys). All may be symbolic.
        batched: has it the second form? Otherwise the batch is 1.

    Returns 8 int32 tensors: for mixed blocks and then for full ones, the number in each row of
    blocks, (batch, 1, rows), and their columns, (batch, 1, rows, columns): a permutation of all
    columns that begins with them, ascending. Then the same with rows and columns exchanged.
    """
    batch, queries, keys = plane.size(0) if batched else 1, plane.size(-2), plane.size(-1)
    rows, columns = ((n + BLOCK - 1) // BLOCK for n in (queries, keys))
    padded = F.pad(plane, (0, columns * BLOCK - keys, 0, rows * BLOCK - queries))
    tiles = padded.reshape(batch, rows, BLOCK, columns, BLOCK)
    visible = tiles.sum((2, 4), dtype=torch.int32)
    full = visible == BLOCK * BLOCK
    mixed = (visible > 0) & ~full
    transposed = (blocks.transpose(1, 2) for blocks in (mixed, full))
    return (
        *(part for blocks in (mixed, full) for part in _ordered(blocks, batch, rows, columns)),
        *(part for blocks in transposed for part in _ordered(blocks, batch, columns, rows)),
    )


def _ordered(blocks: Tensor, batch: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The number of blocks in each row, and their columns. Converts ``blocks``, (batch, rows,
    columns) bool, to the shapes of a BlockMask.

    A stable argsort would do, but Triton takes 25 s to compile the four of them (H100).

    Kernels address a mask of the batch by the stride of the heads' dimension. Its size is 1, so
    Inductor may give it any stride; for ``unsqueeze`` it uses 0, and then all batches read the
    first mask's blocks. ``as_strided`` states the stride, and Inductor keeps its input's layout.
    """
    before = blocks.cumsum(-1, dtype=torch.int32)
    counts = before[..., -1].contiguous()
    column = torch.arange(columns, device=blocks.device)
    position = torch.where(blocks, before - 1, before[..., -1:] + column - before)
    named = column.to(torch.int32).expand(batch, rows, columns)
    order = torch.zeros_like(position).to(torch.int32).scatter(-1, position.to(torch.int64), named)
    size = rows * columns
    return (
        counts.as_strided((batch, 1, rows), (rows, rows, 1)),
        order.as_strided((batch, 1, rows, columns), (size, size, columns, 1)),
    )


def attend(
    call: Node, tensors: Sequence[Node], scale: float | None, plane: Node, lists: Sequence[Node]
) -> Node:
    """Insert FlexAttention before ``call``, an SDPA with the same result, which stays.

    Args:
        call: determines the place, and the result's dtype (with autocast) and strides, which a view
            after it relies on.
        tensors: query, key and value, 4-dimensional; keys and values may have fewer heads.
        scale: of the scores; None for torch's default.
        plane: the mask, (Tq, Tk) or (B, Tq, Tk), bool.
        lists: ``block_lists`` of it.
    """
    put, tensor = Put(call), fake(call)
    # As autocast casts them for SDPA.
    query, key, val = (put.cast(t, tensor.dtype) for t in tensors)
    queries, keys = (put("size", t, -2) for t in (query, key))
    score_mod = _function(call, _score_mod)
    mask_mod = _function(call, _mask_mod_b if fake(plane).dim() == 3 else _mask_mod)
    widths = {fake(query).shape[-1], fake(val).shape[-1]}
    args = (
        query, key, val, score_mod, _block_mask(lists, mask_mod, queries, keys),
        1 / math.sqrt(fake(query).shape[-1]) if scale is None else scale,
        OPTIONS | (WIDTH_64 if widths == {64} else {}), (), (plane,),
    )  # fmt: skip
    with torch.no_grad():
        flex = put(torch.ops.higher_order.flex_attention, *args)
    return _strided(put(operator.getitem, flex, 0), tensor, call)


def _function(call: Node, function: Callable[..., Any]) -> Node:
    module, name = call.graph.owning_module, f"coda{function.__name__}"
    if not isinstance(getattr(module, name, None), GraphModule):
        setattr(module, name, symbolic_trace(function))
    with call.graph.inserting_before(call):
        return call.graph.get_attr(name)


def _score_mod(score, b, h, i, j):  # noqa: ARG001 (FlexAttention calls it)
    return score


def _mask_mod(b, h, i, j, plane):  # noqa: ARG001
    return plane[i, j]


def _mask_mod_b(b, h, i, j, plane):  # noqa: ARG001
    return plane[b, i, j]


def _block_mask(lists: Sequence[Node], mask_mod: Node, queries: Any, keys: Any) -> tuple[Any, ...]:
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    parts: dict[str, Any] = {name: fake(node) for name, node in zip(_PARTS, lists, strict=True)}
    lengths: Any = {"seq_lengths": (queries, keys), "BLOCK_SIZE": (BLOCK, BLOCK)}
    sample = BlockMask(mask_mod=noop_mask, **lengths, **parts).as_tuple()
    nodes = {id(fake(node)): node for node in lists}
    return (*(nodes.get(id(part), part) for part in sample[:-1]), mask_mod)


def _strided(result: Node, like: Tensor, call: Node) -> Node:
    """``result`` with the strides of ``like``; without this, its strides follow the queries'."""
    if same_strides(fake(result), like):
        return result
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda d: (-hint(strides[d]), d))
    back = [order.index(d) for d in range(like.dim())]
    copy = Put(call).traced(lambda t: t.permute(order).contiguous().permute(back), result)
    assert same_strides(fake(copy), like), "SDPA's result is dense"
    return copy
