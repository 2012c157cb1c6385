# SPDX-License-Identifier: Apache-2.0
"""GPUs: which one a decision is for, and everything that was measured on one model of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Gpu:
    """What was measured on one GPU model.

    Attributes:
        name: of the model.
        arch: its compute capability, major.
        table: the measurements of GEMMs and the constants of the model fitted to them.
        smem_bytes: shared memory that one CTA may have.
        bytes_per_us: what an elementwise kernel of Inductor's reaches.
        launch_us: what launching one takes the GPU.
        host_bound_us: a launch of ours costs the host 30 to 50 us, one of cuBLAS 12. Where a
            graph's GEMMs take less than this on average, the GPU waits for the host, and fusing
            makes it wait longer. Llama-3.2-1B on an H100: 19 us (512 tokens) lost 17 %, 49 us (2048
            tokens) won 13 %.
        op_us: one multiplication for each million accumulator elements, on the whole GPU.
        op_shows, op_shows_lean: the share of it that shows where one warpgroup's epilogue runs
            beside the other's main loop: more with small buffers, at which the warps wait for each
            other twice as often.
        cached_instructions: of an epilogue, that the instruction cache holds.
        miss_us, misses_us: what each beyond costs, for a million elements, and all at most.
    """

    name: str
    arch: int
    table: Path
    smem_bytes: int
    bytes_per_us: float
    launch_us: float
    host_bound_us: float
    op_us: float
    op_shows: float
    op_shows_lean: float
    cached_instructions: float
    miss_us: float
    misses_us: float


#: The only one so far: every Hopper is costed as an H100 with its own number of processors.
H100 = Gpu(
    name="H100",
    arch=9,
    table=Path(__file__).parent / "tables" / "h100.json",
    smem_bytes=227 * 1024,
    bytes_per_us=2.7e6,
    launch_us=2.0,
    host_bound_us=48.0,
    op_us=0.03,
    op_shows=0.5,
    op_shows_lean=0.9,
    cached_instructions=7900.0,
    miss_us=0.01,
    misses_us=24.0,
)


def arch_of(device=None) -> int:
    """Compute capability, major, of a device; 9 (Hopper) where there is no CUDA."""
    device = torch.device("cuda") if device is None else torch.device(device)
    if device.type != "cuda":
        return 9
    known = _majors.get(device.index)  # asked at every launch: torch takes microseconds to answer
    if known is None:
        if not torch.cuda.is_available():
            return 9
        index = torch.cuda.current_device() if device.index is None else device.index
        known = torch.cuda.get_device_capability(index)[0]
        if device.index is not None:
            _majors[device.index] = known
    return known


_majors: dict[int | None, int] = {}
