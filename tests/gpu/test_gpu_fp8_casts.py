# SPDX-License-Identifier: Apache-2.0
"""``fp8_cast`` and ``fp8_amax`` on a GPU: the numbers of a CPU, to the bit, from our kernels."""

import pytest
import torch
from casting import E4M3, E5M2, cast_of, same, scale_of, subject

from coda_inductor.semantic.fp8_casts import AMAX, CAST

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_fallbacks")]


def agree(got, want) -> bool:
    return all(same(g.cpu(), w) for g, w in zip(got, want, strict=True))


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """The same numbers of rows and columns: as they are, turned, in a wider tensor, not aligned,
    with gaps, and one row again and again."""
    wide = torch.cat([x, x], 1)
    views = [wide[:, : x.shape[1]], wide[:, 1 : 1 + x.shape[1]], wide[:, ::2]]
    return [x, x.t(), *views, x[:1].expand(x.shape)]


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (1024, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_and_maxima(shape, dtype):
    """One layout but in bfloat16: each has kernels of its own, which take half a second each."""
    every = layouts(subject(*shape, dtype))
    for x in every if dtype == torch.bfloat16 else every[:1]:
        on_gpu = moved(x)
        rows, cols, one = (scale_of(x, dims, E4M3) for dims in ([1], [0], []))
        power = scale_of(x, [0], E5M2, power=True)
        factor = torch.rand(x.shape[0], 1) + 0.5
        for by in (None, factor):
            for scales in (
                (rows, E4M3, power, E5M2), (one, E5M2, one, E5M2), (rows, E4M3, None, None),
                (None, None, cols, E4M3), (cols, E5M2, rows, E4M3),
            ):  # fmt: skip
                want = CAST(x, by, *scales)
                got = CAST(on_gpu, *(v.cuda() if torch.is_tensor(v) else v for v in (by, *scales)))
                assert agree(got, want)
            want = AMAX(x, by, True, True)
            got = AMAX(on_gpu, by if by is None else by.cuda(), True, True)
            assert agree(got, want)


def moved(x: torch.Tensor) -> torch.Tensor:
    """``x`` on the GPU with the strides and the alignment that it has."""
    storage = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device="cuda")
    storage.copy_(torch.as_strided(x, (storage.numel(),), (1,), 0))
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_every_16_bit_number(target):
    """Each bfloat16 there is, times a few scales: rounding, subnormals, saturation, NaN."""
    x = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    for value in (1.0, 1.37, 2.0**-6, 3e5):
        scale = torch.tensor(value)
        q, qt = CAST(x.cuda(), None, scale.cuda(), target, scale.cuda(), target)
        assert same(q.cpu(), cast_of(x, scale, target))
        assert same(qt.cpu(), cast_of(x, scale, target).t())


def test_more_elements_than_32_bits_count():
    x = torch.zeros(2**15 + 1, 2**16, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(2**16, device="cuda")
    rows, cols = torch.rand(len(x), 1, device="cuda"), torch.rand(1, 2**16, device="cuda")
    q, qt = CAST(x, None, rows, E4M3, cols, E5M2)
    assert same(q[-1:], cast_of(x[-1:], rows[-1:], E4M3))
    assert same(qt[:, -1:], cast_of(x[-1:], cols, E5M2).t())
    assert not q[:-1].view(torch.uint8).any()
    over_rows, over_cols = AMAX(x, None, True, True)
    assert same(over_rows.amax(1)[-1], x[-1].abs().max().float())
    assert same(over_cols.amax(0), x[-1].abs().float())


def test_in_a_graph_of_cudas():
    def step(x):
        rows, cols = AMAX(x, None, True, True)
        by_row, by_col = (448 / v for v in (rows.amax(1, keepdim=True), cols.amax(0, keepdim=True)))
        return CAST(x, None, by_row, E4M3, by_col, E4M3)

    plain = torch.compile(step, fullgraph=True)  # Triton's quotients are not eager's
    replayed = torch.compile(step, fullgraph=True, options={"triton.cudagraphs": True})
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(256, 384, device="cuda").bfloat16()
        for ours, wanted in zip(replayed(x), plain(x), strict=True):
            assert same(ours, wanted)
