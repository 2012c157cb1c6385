# SPDX-License-Identifier: Apache-2.0
"""Which GPU a decision is for."""

from __future__ import annotations

import torch


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
