# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that ran once, called again.

A launch through Triton's own door binds and specializes every argument, which takes the host longer
than all the rest of a call, where a training step in FP8 makes some forty calls a layer. What it
looks at (dtypes, sizes, strides, addresses that are multiples of 16 bytes) is the key here. One
that is known goes to the compiled kernel, as Triton would.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

#: Sizes may change without end.
_MOST = 512
Launch = Callable[..., Any]


def key_of(*tensors: Tensor | None) -> Hashable:
    """What a launch depends on; of all, on one device, which is the current one's number."""
    return tuple(
        x if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors
    )


class Launches:
    """Launches of one kernel, by what they depend on.

    Attributes:
        known: key -> what :meth:`first` was told to do the next time.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.known: dict[Hashable, Launch] = {}

    def first(
        self, key: Hashable | None, grid: tuple[int, int], args: tuple, rest: tuple, **options
    ) -> None:
        """Launch ``kernel[grid](*args, *rest, **options)``, and the next time with this key (None:
        there is none) through :meth:`again`, with other ``args``."""
        blocks = (*grid, 1)
        compiled = self.kernel[blocks](*args, *rest, **options)
        if key is None or not hasattr(compiled, "__getitem__"):  # Triton's interpreter has none
            return
        launch = compiled[blocks]
        if len(self.known) >= _MOST:
            self.known.clear()
        self.known[key] = lambda *others: launch(*others, *rest)

    def again(self, key: Hashable) -> Launch | None:
        """Takes the ``args`` of a launch with that key, if there was one."""
        return self.known.get(key)


def current(x: Tensor) -> bool:
    """Is ``x`` on the current device?"""
    return x.is_cuda and torch.cuda.current_device() == x.device.index
