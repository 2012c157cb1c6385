# SPDX-License-Identifier: Apache-2.0
"""Each way of sharding once with Inductor's own code, which re-uses memory around collectives."""

from __future__ import annotations

import warnings

import torch
from decoder import OPTIONS, fired, fresh, full, mine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo.layers import Gated

import coda_inductor

INDUCTOR = True
STEPS = 2


def part() -> Gated:
    torch.manual_seed(0)
    return Gated(16, 32, front=True).double()


def steps(model, rows) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(8, 16, dtype=torch.float64, generator=generator)
        model(rows(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(model, rows=mine) -> None:
    """Steps that must be those of one rank with all rows."""
    steps(model, rows)
    steps(plain := part(), lambda x: x)
    for have, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(have.detach()), want, rtol=1e-6, atol=1e-9)


def check_tensor_parallelism_by_the_backend():
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    fresh()
    model = part()
    model.compile(backend="coda", options=OPTIONS)
    trained(parallelize_module(model, init_device_mesh("cpu", (2,)), plan), rows=lambda x: x)
    assert fired()["swiglu_backward"] == 1


def check_fully_sharded_parameters_where_only_inductor_is_accepted():
    """A layer returns no view: FSDP2 warns of those, for what writes to one drops its hooks."""
    fresh()
    model = part()
    with (
        coda_inductor.enabled(**OPTIONS),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        model.compile()
        trained(fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
    assert not [w for w in said if "returned a view" in str(w.message)]
    names = ("rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward")
    assert {name: fired()[name] for name in names} == dict.fromkeys(names, 1)
