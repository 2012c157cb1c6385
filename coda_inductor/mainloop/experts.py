# SPDX-License-Identifier: Apache-2.0
"""The memory-bound ops around a mixture's grouped GEMMs, in Triton; and the gradient of their
weights, a GEMM of QuACK whose K is the rows of an expert. See ``semantic.experts``.

Routing is a counting sort, stable and the same at every run: each block of pairs counts them by
expert, a scan over blocks gives the start for each block and expert, and a pair's position is that
start plus the number of earlier pairs of the same expert in the block.
"""

import functools
from collections.abc import Sequence

import quack.gemm
import torch
import triton
import triton.language as tl
from quack.cute_dsl_utils import get_device_capacity
from torch import Tensor

from coda_inductor.mainloop import store
from coda_inductor.mainloop.mod import kernel_name
from coda_inductor.program.dtypes import dtype_name
from coda_inductor.semantic.experts import WGRAD, wgrad_result

#: The most pairs of a block times experts: a thread has 64 of these counts.
_COUNTS = 32768
_MOST_EXPERTS = 1024
#: Columns that a program sums at a time: 16 bytes of 16 bits a thread.
_COLUMNS = 2048
#: (tile_m, tile_n, cluster_m, ping-pong) of gradients of weights, within 6 % of the fastest of
#: seven on an H100, and from how many columns of a part on the second is used.
_TILES, _MANY_COLUMNS = {"few": (128, 256, 2, False), "many": (128, 192, 2, True)}, 4096


@triton.jit
def _expert(ids, pair, m, EXPERTS: tl.constexpr):
    """The expert of each pair; EXPERTS if it has none, and a larger number beyond the last pair."""
    expert = tl.load(ids + pair, pair < m, -1)
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS).to(tl.int32)
    return tl.where(pair < m, expert, EXPERTS + 1)


@triton.jit
def _count(ids, counts, m, blocks, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    block, kinds = tl.program_id(0), tl.arange(0, WIDTH)
    expert = _expert(ids, block * BLOCK + tl.arange(0, BLOCK), m, EXPERTS)
    sums = tl.sum((expert[:, None] == kinds[None, :]).to(tl.int32), 0)
    tl.store(counts + kinds * blocks + block, sums, kinds <= EXPERTS)


@triton.jit
def _scan(counts, totals, blocks, SPAN: tl.constexpr):
    """For one expert: the number of its pairs before each block, in place, and their total."""
    row, total = counts + tl.program_id(0) * blocks, 0
    for start in range(0, blocks, SPAN):
        offset = start + tl.arange(0, SPAN)
        count = tl.load(row + offset, offset < blocks, 0)
        tl.store(row + offset, total + tl.cumsum(count, 0) - count, offset < blocks)
        total += tl.sum(count, 0)
    tl.store(totals + tl.program_id(0), total)


@triton.jit
def _position(
    ids, counts, totals, rows, perm, inverse, offsets, m, blocks,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    block, kinds = tl.program_id(0), tl.arange(0, WIDTH)
    total = tl.load(totals + kinds, kinds <= EXPERTS, 0)
    first = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(offsets + kinds, first, kinds <= EXPERTS)
    first += tl.load(counts + kinds * blocks + block, kinds <= EXPERTS, 0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = _expert(ids, pair, m, EXPERTS)
    matches = expert[:, None] == kinds[None, :]
    rank = tl.cumsum(matches.to(tl.int32), 0) - 1
    position = tl.sum(tl.where(matches, rank + first[None, :], 0), 1)
    tl.store(inverse + pair, position, pair < m)
    tl.store(perm + position, pair, pair < m)
    tl.store(rows + position, pair // TOP_K, pair < m)


def route(ids: Tensor, experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``semantic.experts.route``. Raises ValueError for more than 1022 ``experts``."""
    m, width = ids.shape[0], triton.next_power_of_2(experts + 2)
    if width > _MOST_EXPERTS:
        raise ValueError(f"{experts} experts are more than {_MOST_EXPERTS - 2}")
    rows, perm, inverse = (ids.new_empty(m, dtype=torch.int32) for _ in range(3))
    offsets = ids.new_zeros(experts + 1, dtype=torch.int32)
    if m == 0:
        return rows, perm, inverse, offsets
    block = min(256, _COUNTS // width)
    blocks = triton.cdiv(m, block)
    counts = ids.new_empty(experts + 1, blocks, dtype=torch.int32)
    totals = ids.new_empty(experts + 1, dtype=torch.int32)
    ids = ids.contiguous()
    sizes = {"EXPERTS": experts, "WIDTH": width, "BLOCK": block}
    with torch.cuda.device(ids.device):
        _count[(blocks,)](ids, counts, m, blocks, **sizes)
        _scan[(experts + 1,)](counts, totals, blocks, SPAN=1024)
        _position[(blocks,)](
            ids, counts, totals, rows, perm, inverse, offsets, m, blocks, **sizes, TOP_K=top_k
        )
    return rows, perm, inverse, offsets


@triton.jit
def _sum(
    y, weights, inverse, offsets, out, stride, d, experts,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(offsets + experts)
    total = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(TOP_K):
        row = tl.load(inverse + token * TOP_K + i).to(tl.int64)
        inside = (column < d) & (row < end)
        value = tl.load(y + row * stride + column, inside, 0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * TOP_K + i).to(tl.float32)
        total += value
    tl.store(out + token * d + column, total.to(out.dtype.element_ty), column < d)


def combine(
    y: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor, top_k: int,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """As ``semantic.experts.combine``."""
    d, tokens = y.shape[1], inverse.shape[0] // top_k
    out = y.new_empty(tokens, d, dtype=dtype or y.dtype)
    if not out.numel():
        return out
    y = y if y.stride(1) == 1 else y.contiguous()
    columns = min(_COLUMNS, triton.next_power_of_2(d))
    with torch.cuda.device(y.device):
        _sum[(tokens, triton.cdiv(d, columns))](
            y, y if weights is None else weights.contiguous(), inverse, offsets, out,
            y.stride(0), d, offsets.shape[0] - 1,
            TOP_K=top_k, WEIGHTED=weights is not None, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return out


def grouped_wgrad(
    a: Tensor, rows: Tensor | None, bs: Sequence[Tensor], offsets: Tensor, turned: bool
) -> Tensor:
    """As ``semantic.experts.grouped_wgrad``, in 16 bits. Each part of ``bs`` is a launch that
    writes its columns of the result, in either layout."""
    out = wgrad_result(a, bs, offsets, turned)
    widths = [b.shape[1] for b in bs]
    with torch.cuda.device(a.device):
        for b, n, part in zip(bs, widths, out.split(widths, -1), strict=True):
            _gradient(a, rows, b, offsets, part, columns(n))
    return out


def columns(n: int) -> str:
    """The kernel for gradients of weights with ``n`` columns: "few" or "many"."""
    return "many" if n >= _MANY_COLUMNS else "few"


def _gradient(a: Tensor, rows: Tensor | None, b, offsets, out: Tensor, size: str) -> None:
    tile_m, tile_n, cluster, pingpong = _TILES[size]
    variant = "turned" if out.stride(1) == 1 else ""
    program = f"{WGRAD.name()} {dtype_name(a.dtype)}"
    with store.named(_gradient_name(program, size, variant, a.device)):
        quack.gemm.gemm(
            a.mT, b.mT, out, None, None, tile_m, tile_n, cluster, 1,
            pingpong=pingpong, cu_seqlens_k=offsets, A_idx=rows,
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _gradient_name(program: str, size: str, variant: str, device: torch.device) -> str:
    arch = "".join(map(str, get_device_capacity(device)))
    return kernel_name(program, size, "m", "n", variant, arch)


def compile_gradient(program: str, size: str, variant: str) -> None:
    """Compile the kernel of a weight gradient, in a process that launches nothing. The arguments
    are as in its request (``runtime.on_cuda.requests``)."""
    quack.gemm.get_max_active_clusters = lambda *_, **__: 0
    quack.gemm.launch_gemm = lambda *_: None
    quack.gemm._gemm_plan_cache.clear()
    quack.gemm._compile_gemm.cache_clear()
    dtype = getattr(torch, program.rpartition(" ")[2])
    a, b = (torch.empty(64, 64, dtype=dtype, device="meta") for _ in range(2))
    offsets, rows = (torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 64))
    _gradient(a, rows, b, offsets, wgrad_result(a, [b], offsets, bool(variant)), size)
