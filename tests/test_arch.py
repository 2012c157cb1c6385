# SPDX-License-Identifier: Apache-2.0
"""A generation of GPUs is one record, and a table of what was measured on one of them."""

from dataclasses import replace

import pytest
import torch
from measured import figures, keyed, site, table
from programs import grouped, kinds

from coda_inductor import arch
from coda_inductor.arch import ARCHS, Arch, arch_of, arch_with
from coda_inductor.gpu import H100, match_gpu
from coda_inductor.mainloop import availability
from coda_inductor.select.choice import candidates, select
from coda_inductor.select.config import Config, legal_configs, mainloop_stages
from coda_inductor.select.measurements import Measurements

LARGE, SMALL = "256x256:2x1:co", "128x128:1x1:co"
NEXT = Arch(
    "the next one", (13,), {"common": f"{LARGE} {SMALL}"}, widest=({}, {128: 128, 256: 256}),
    smem_bytes=300 * 1024, two_ctas=True, columns=64,
)  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(arch, "ARCHS", (*ARCHS, NEXT))
    monkeypatch.setattr(arch, "_archs", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (13, 1))
    monkeypatch.setattr(availability, "library_stack", lambda: None)
    availability.kernel_stack.cache_clear()
    yield
    availability.kernel_stack.cache_clear()


def test_a_new_generation_is_a_record(machine, tmp_path):
    device = torch.device("cuda", 0)
    assert arch_of(device) is NEXT
    assert availability.kernel_stack(device) is None
    gpu = match_gpu("NVIDIA N1", (13, 1), 160, {H100.name: H100})
    assert (gpu.arch, gpu.rated) == (NEXT, False)
    of = site("scale", arch=NEXT)
    for program in (*kinds().values(), of.program):
        legal = legal_configs(program, NEXT)
        assert {str(config) for config in legal} <= {LARGE, SMALL}
        assert all(config.tile_refusal(NEXT) is None for config in legal)
    assert mainloop_stages(of.program, Config.parse(LARGE), NEXT) > 4
    assert list(map(str, candidates(of, gpu))) == [LARGE, SMALL]
    assert (
        select(of, gated=True, store=Measurements(gpu, tmp_path)).refusal.code == "gpu-not-measured"
    )
    assert select(of, gated=False, store=Measurements(gpu, tmp_path)).config == LARGE
    experts = replace(of, program=grouped()["experts_down"])
    refused = select(experts, gated=False, store=Measurements(gpu, tmp_path)).refusal
    assert refused.code == "kernel-form"
    gpu = table(tmp_path, "NVIDIA N1", keyed(of, figures({SMALL: 50.0})), capability=(13, 1))
    assert (gpu.arch, gpu.rated) == (NEXT, True)
    found = select(of, gated=True, store=Measurements(gpu, tmp_path))
    assert (found.how, found.config, found.ground) == ("kernel", SMALL, "shipped")


@pytest.mark.parametrize(
    ("capability", "name", "casts"),
    [((8, 0), "compute capability 8.0", False), ((8, 9), "compute capability 8.9", True),
     ((9, 0), "Hopper", True), ((11, 0), "data center Blackwell", True),
     ((12, 1), "consumer Blackwell", True), ((14, 0), "compute capability 14.0", True)],
)  # fmt: skip
def test_which_generation_a_capability_is(capability, name, casts):
    """Also one of the future casts to FP8."""
    found = arch_with(capability)
    assert (found.name, "casts" in found.features) == (name, casts)
    assert found is arch_with(capability)
    assert found.runs == (found in ARCHS)
    assert bool(legal_configs(kinds()["scale"], found)) == found.runs
