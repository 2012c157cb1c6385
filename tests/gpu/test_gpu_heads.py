# SPDX-License-Identifier: Apache-2.0
"""Kernels of programs that know heads, on a GPU against the reference executor."""

from __future__ import annotations

import pytest
import torch
from oracle import NEEDS_KERNELS, build, check, config_for
from programs import heads, inputs

from coda_inductor.mainloop.availability import kernel_stack
from coda_inductor.runtime.pool import KernelRequest
from coda_inductor.select.config import legal_configs
from coda_inductor.select.device import arch_of

pytestmark = NEEDS_KERNELS

DTYPES = ("bfloat16", "float16")
K = 136  # ragged, as are all M
#: One of each way across columns: whole heads and parts, halves and neighbours, wide tables.
EVERY_CONFIG = ("halves_64", "halves_80", "neighbours_in_part", "everything")
NAMES = [name for name, p in heads().items() if kernel_stack() or legal_configs(p, arch_of())]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    requests = [
        KernelRequest(program.to_json(), str(config_for(program)))
        for dtype in DTYPES
        for name, program in heads(dtype).items()
        if name in NAMES
    ]
    for name in set(EVERY_CONFIG).intersection(NAMES):
        program = heads()[name]
        requests += [
            KernelRequest(program.to_json(), str(config))
            for config in legal_configs(program, arch_of())
        ]
    build(requests)


@pytest.mark.parametrize("heads", [1, 3, 10])
@pytest.mark.parametrize("m", [1, 127, 1021])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_program(dtype, name, m, heads):
    program = heads(dtype)[name]
    check(program, *inputs(program, m, heads * program.head, K, device="cuda"))


@pytest.mark.parametrize("name", [name for name in EVERY_CONFIG if name in NAMES])
def test_every_config(name):
    program = heads()[name]
    arguments = inputs(program, 1000, 11 * program.head, 200, device="cuda")
    for config in legal_configs(program, arch_of()):
        check(program, *arguments, config)


def test_tables_that_lie_otherwise():
    program = heads()["halves_128"]
    as_, bs, (*vectors, cos, sin) = inputs(program, 300, 384, K, device="cuda")
    shifted = torch.empty(cos.numel() + 1, dtype=cos.dtype, device="cuda")[1:].view(cos.shape)
    beside = torch.cat([cos, sin], 1)
    for tables in (
        (shifted.copy_(cos), sin),
        (beside[:, :128], beside[:, 128:]),
        (cos.t().contiguous().t(), sin.float()),
        (cos[:1].expand(cos.shape), sin),
    ):
        check(program, as_, bs, [*vectors, *tables])
