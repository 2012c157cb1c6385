# SPDX-License-Identifier: Apache-2.0
"""Suite `grid`: the layer of suite `layer` at many widths and rows, forward and training.

Weights and inputs are shared by the variants. ``grid_run`` is its command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import gradients, layer, layer_train
from .cases import FORWARD, TRAINING, Case
from .measure import Call, register, relative_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Way

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NORM = "hf"
#: Each width has four rows of its own beside the fifth, which alternates.
ROWS = (512, 4096, 5000, 8192)
FIFTH = {"1B": 1000, "3B": 2048, "8B": 1000, "13B": 2048, "32B": 1000, "70B": 2048}
LONGEST = {"1B": 16384, "3B": 16384}
HALF = (("1B", 4096), ("8B", 5000), ("13B", 2048))


def every() -> list[Case]:
    """The cases of the grid: 70."""
    places = [(size, rows) for size, fifth in FIFTH.items() for rows in sorted((*ROWS, fifth))]
    places += list(LONGEST.items())
    modes = (FORWARD, TRAINING)
    cases = [Case(size, rows, mode) for size, rows in places for mode in modes]
    return cases + [Case(size, rows, mode, "fp16") for size, rows in HALF for mode in modes]


class Layer:
    """The layer of one case with its inputs: made once, used by all variants.

    Raises KeyError where its size is none that :func:`benchmarks.layer.widths` takes.
    """

    def __init__(self, case: Case):
        d, f, kv = layer.widths(case.size)
        self.shape = {"M": case.rows, "d": d, "f": f, "kv": kv, "norm": NORM}
        self.training = case.training
        self.block, x0, y = layer.build(case.size, case.rows, NORM, DTYPES[case.dtype])
        self.inputs = [x0, y]
        self.given: list[torch.Tensor] = []
        if self.training:
            self.inputs = [x0.requires_grad_(), y.requires_grad_()]
            self.given = layer_train.tangents(self.block, x0)

    def compiled(self, way: Way) -> Call:
        """The layer, or its forward and backward, compiled that way when first called."""
        register(way.backend)
        function = torch.compile(
            self.block, fullgraph=True, backend=way.backend, mode=way.mode, options=way.options
        )
        if self.training:
            return gradients.step(function, self.inputs, self.block.parameters(), self.given)
        return lambda: function(*self.inputs)

    def difference(self, values: Sequence[torch.Tensor], truths: Sequence[torch.Tensor]) -> float:
        """The worst of the outputs' (training: gradients') relative differences from `truths`."""
        return max(
            relative_error(value, truth) for value, truth in zip(values, truths, strict=True)
        )


def variants(_case: Case) -> tuple[str, ...]:
    """The variants that a case has, of :func:`benchmarks.cases.ways`."""
    return ("compile", "coda", "max_autotune", "coda_options")
