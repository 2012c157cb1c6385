# SPDX-License-Identifier: Apache-2.0
"""What a kernel is held to on a GPU.

The rule: the largest error to the float32 oracle is at most twice that of the unfused 16-bit
computation (which rounds the product before the epilogue), plus float32 noise. Nothing to tune.
"""

import dataclasses
import functools

import pytest
import torch

from coda_inductor.arch import HOPPER, arch_of
from coda_inductor.mainloop.availability import kernel_stack
from coda_inductor.program import reference
from coda_inductor.runtime.op import gemm_epilogue
from coda_inductor.select.config import Config, legal_configs

#: Hopper's where there is no GPU, so that its tests are collected everywhere.
ARCH = HOPPER if kernel_stack() else arch_of()
#: The op, without a fallback: a kernel that does not run must fail the test.
launched = functools.partial(gemm_epilogue, strict=True)


NEEDS_KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(kernel_stack() is not None, reason=str(kernel_stack())),
]


def config_for(program) -> Config:
    return legal_configs(program, ARCH)[0]


def combined(program, outputs):
    """Stores as they are, partials of reductions combined over their tiles, in float32."""
    return [value.float() for value in reference.combined(program, outputs)]


def hold(have, plain, exact, what=""):
    """Hold ``have`` to the rule: ``plain`` is the unfused result, ``exact`` that in float32."""
    assert have.shape == exact.shape, what
    if not exact.numel():
        return
    have, plain, exact = have.float(), plain.float(), exact.float()
    assert have.isfinite().all() == exact.isfinite().all(), what
    error = (have - exact).abs().max()
    allowed = 2 * (plain - exact).abs().max() + 1e-5 * exact.abs().max() + 1e-6
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"


def check(program, as_, bs, operands, config=None, call=launched):
    """Run the op and hold it to the rule; returns its outputs."""
    got = call(as_, bs, operands, program, config or config_for(program))
    torch.cuda.synchronize()
    unrounded = tuple(dataclasses.replace(s, dtype="float32") for s in program.stores)
    exactly = dataclasses.replace(program, stores=unrounded)
    oracle = combined(program, reference.run(exactly, as_, bs, operands))
    unfused = combined(program, reference.run(program, as_, bs, operands, exact=False))
    for spec, x, exact, plain in zip(
        program.outputs, combined(program, got), oracle, unfused, strict=True
    ):
        hold(x, plain, exact, spec)
    return got
