# SPDX-License-Identifier: Apache-2.0
"""Two ranks of DistributedDataParallel over gloo, with torch's compile caches off.

Graphs run op by op behind our passes: Inductor's C++ for two ranks would take minutes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
SECONDS = 120  # for what takes 15 to 20 of a machine that has nothing else to do

PROGRAM = textwrap.dedent("""
    import gc, sys, weakref
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch._functorch.aot_autograd import make_boxed_func
    from torch.nn.parallel import DistributedDataParallel

    from coda_inductor import op_by_op

    op_by_op.compile_fx_inner = lambda gm, inputs, **how: make_boxed_func(gm.forward)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    def train(backend):
        torch.manual_seed(0)
        model = DistributedDataParallel(Block())
        step = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(3):
            step(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = [weakref.ref(model), weakref.ref(model.module), weakref.ref(model.module.up.weight)]
        return torch.cat([p.detach().flatten() for p in model.parameters()]), kept

    dist.init_process_group("gloo")
    ours, kept = train("coda")
    gc.collect()
    assert not any(reference() for reference in kept), "something keeps the model"
    assert torch._dynamo.utils.counters["coda"], "our passes did not run"
    theirs, _ = train("eager")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.save(ours, sys.argv[1])
    dist.destroy_process_group()
""")


def test_a_run_ends_and_nothing_keeps_its_model(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    files = [tmp_path / str(rank) for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(file)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=(tmp_path / f"{rank}.txt").open("w"),
        )
        for rank, file in enumerate(files)
    ]
    try:
        codes = [rank.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, 0], (tmp_path / "0.txt").read_text()
    first, second = map(torch.load, files)
    assert torch.equal(first, second)
