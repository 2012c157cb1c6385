# SPDX-License-Identifier: Apache-2.0
"""Calls of one kernel whose tensors differ only in M and in their addresses.

The first call goes the full way through ``launch.Kernel``, which checks, converts and copies. All
other calls use its results, and check only what may differ between two such calls: the addresses
(16-byte multiples; for two weights or terms, their order and distance), M, and PyTorch's current
device. If a check fails, the call goes the full way again. The kernel's entry point checks dtypes,
shapes and the outputs' strides once more.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.cuda import current_device  # on which outputs are allocated

from coda_inductor.arch import arch_of
from coda_inductor.compat import empty_strided_cuda
from coda_inductor.mainloop.tensors import UnpairableError, readable
from coda_inductor.program import Operand, Reduce

if TYPE_CHECKING:
    from coda_inductor.runtime.launch import Kernel

#: (as_, bs, operands) -> the outputs, or None for a call that must go the full way. It raises
#: whatever the kernel's entry point raises.
Prepared = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], list[Tensor] | None]


def call_key(as_: Sequence[Tensor], bs: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple:
    """A key that is equal for calls of one kernel that differ only in M and in addresses."""
    key: list[object] = [as_[0].get_device()]
    for x in as_:
        key += x.shape[1], x.stride(), x.dtype
    for x in bs:
        key += x.shape, x.stride(), x.dtype
    for x in operands:
        key += x.stride(), x.dtype
    return tuple(key)


def prepare(
    kernel: "Kernel", as_: Sequence[Tensor], bs: Sequence[Tensor], operands: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Prepared | None:  # fmt: skip
    """The launch for all calls like this one, which has run and computed ``outputs``; None if a
    tensor is copied or cast. Raises UnpairableError if operands of this call alone were copied."""
    from coda_inductor.mainloop.plan import ready

    program, a = kernel.program, as_[0]
    by_tile = [isinstance(x, Reduce) and x.axis == "col" for x in program.outputs]
    if program.paired and any(by_tile):  # copied after the launch
        return None
    if not all(map(_is_direct, program.operands, operands, [a] * len(operands))):
        return None
    tile_m = kernel.config.cta_tile_m(arch_of(a.device))
    # Of each output: the rows of a tile, if each tile has one row of it, or 0; columns; dtype.
    layouts = [
        (tile_m * tiled, x.shape[1], x.dtype) for tiled, x in zip(by_tile, outputs, strict=True)
    ]
    reading = kernel.reading(len(as_))
    read = reading.in_place(as_, bs)
    if read is None:
        return None
    names = [x.name for x in (*program.operands, *program.outputs)] + [*reading.distances]
    launches: dict[str, Any] = {
        variant: ready(kernel.plans[left, right, variant, a.device], names)
        for left, right, variant in reading.kernels(as_, bs)
    }
    names = [o.name for o in program.operands]
    c = None if kernel.mapping.c is None else names.index(kernel.mapping.c)
    d = None if kernel.mapping.d is None else program.outputs.index(kernel.mapping.d)
    has_batch = any("B" in o.spec.dims for o in program.operands)
    scalars = [i for i, o in enumerate(program.operands) if o.kind == "scalar"]
    most_rows = math.inf if a.stride(1) == 1 else a.stride(1)  # that can be read in place
    (groups, gathered), index = program.routes, a.get_device()

    def call(as_, bs, operands):
        m = (as_[0] if gathered is None else operands[gathered]).shape[0]
        bits = as_[0].data_ptr() | bs[0].data_ptr()
        for x in operands:
            bits |= x.data_ptr()
        if bits & 15 or not 0 < m <= most_rows or index != current_device():
            return None
        if has_batch and program.too_thin(m, operands):
            return None
        for i in scalars:
            if operands[i].get_device() != index:
                return None
        try:
            a, b, variant, distances = read(as_, bs)
        except UnpairableError:
            return None
        outputs = [
            empty_strided_cuda((-(-m // rows) if rows else m, n), (n, 1), dtype)
            for rows, n, dtype in layouts
        ]
        c_tensor, d_tensor = None if c is None else operands[c], None if d is None else outputs[d]
        values = [*operands, *outputs, *distances, None]
        if groups is None:
            launches[variant](a, b, d_tensor, c_tensor, values)
        else:
            rows = None if gathered is None else operands[gathered]
            launches[variant](a, b, d_tensor, c_tensor, values, operands[groups], rows)
        return outputs

    return call


def _is_direct(operand: Operand, x: Tensor, a: Tensor) -> bool:
    if x.device != a.device or x.dtype != getattr(torch, operand.kernel_dtype):
        return False
    if operand.spec.staged:
        return readable(x)
    return x.dim() == 0 or (x.stride(-1) == 1 and x.is_contiguous())
