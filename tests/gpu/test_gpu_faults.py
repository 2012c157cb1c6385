# SPDX-License-Identifier: Apache-2.0
"""Public faults with kernels: the programs of ``test_public_faults``, and what only a GPU has."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import ARCH, NEEDS_KERNELS
from programs import fp8, inputs
from test_gpu_fp8 import NAMES, check
from test_public_faults import PROGRAMS
from torch import nn

from coda_inductor.backend import coda
from coda_inductor.cache_dir import cache_dir
from coda_inductor.select.config import legal_configs

pytestmark = NEEDS_KERNELS
#: Programs that name the CPU.
ON_CPU = ("autocast",)
OPTIONS = {"gate": "always"}


@pytest.fixture
def on_gpu():
    with torch.device("cuda"):
        yield


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", [n for n in PROGRAMS if not any(part in n for part in ON_CPU)])
def test_it_is_no_fault_with_kernels(name):
    PROGRAMS[name](lambda function: torch.compile(function, backend=coda, options=OPTIONS))


def test_every_config_keeps_nan_and_inf():
    """pytorch/ao 4652: a quarter of the configs lost rows beside one of NaN."""
    name = next(name for name in NAMES if any(r.combine == "max" for r in fp8()[name].reduces))
    program = fp8()[name]
    (a,), bs, operands = inputs(program, 144, 144, 64, device="cuda")
    wide = a.float()
    wide[3, 5] = math.nan
    a = wide.to(a.dtype)
    for config in legal_configs(program, ARCH):
        check(program, [a], bs, operands, config)


@pytest.mark.usefixtures("on_gpu")
def test_tensors_of_no_dimension_compile_one_kernel():
    """modelscope/ms-swift 9797: a kernel was compiled for each value of a 0-dim tensor."""
    linear = nn.Linear(256, 256, dtype=torch.bfloat16)
    compiled = torch.compile(
        lambda x, scale: F.gelu(linear(x) * scale), backend=coda, options=OPTIONS
    )
    found = set()
    with torch.no_grad():
        for step in range(20):
            compiled(torch.randn(512, 256, dtype=torch.bfloat16), torch.tensor(step / 2.0))
            torch.cuda.synchronize()
            found.add(len(list(cache_dir().rglob("*.o"))))
    assert len(found) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
