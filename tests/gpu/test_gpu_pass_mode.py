# SPDX-License-Identifier: Apache-2.0
"""Kernels under backend="inductor", and none in AOTInductor's programs."""

import pytest
import torch
from layers import agree, compiled, errors, make

import coda_inductor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]


def inputs():
    return tuple(torch.randn(1, 1024, 256, device="cuda").bfloat16() for _ in range(2))


def kernels():
    """(program, config) of each site of the last graph, and how it runs."""
    sites = coda_inductor.reports()[-1].sites
    return [(site.program and site.program.key, site.config, site.how) for site in sites]


def gradients(call, model, xs):
    outputs = call(*xs)
    torch.manual_seed(2)
    return torch.autograd.grad(outputs, [*model.parameters()], [*map(torch.randn_like, outputs)])


def test_training_has_the_backends_kernels():
    """The backward pass is compiled in autograd's thread for the device."""
    model, xs = make().train(), inputs()
    want = gradients(compiled(model, strict=True), model, xs)
    sites = kernels()
    torch._dynamo.reset()
    with coda_inductor.enabled(gate="always", strict=True):
        mine = gradients(torch.compile(model), model, xs)
    assert kernels() == sites
    # o, gate and up, down, q; the gradients of q, of down, of up and gate: the inputs need none.
    assert sum(how == "kernel" for *_, how in sites) == 7
    assert max(errors(mine, want)) < 1e-3


def test_aot_inductors_programs_have_no_kernels_of_ours(tmp_path):
    model, xs = make(), inputs()
    with torch.no_grad(), coda_inductor.enabled(gate="always"):
        program = torch.export.export(model, xs)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        mine = torch._inductor.aoti_load_package(path)(*xs)
        assert not coda_inductor.reports()
    agree(lambda *_: mine, model, *xs)
