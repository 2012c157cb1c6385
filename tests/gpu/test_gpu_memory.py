# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie, and what happens to them between calls: kernels that read two allocations as
one operand must neither touch what is between them nor hold on to an address."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layers import compiled, errors, make
from oracle import NEEDS_KERNELS, check, config_for, launched
from programs import inputs, kinds, legal

pytestmark = [*NEEDS_KERNELS, pytest.mark.usefixtures("fresh")]
HERE = Path(__file__).parent
M, N, K = 129, 264, 64
PAIR, JOINED = legal(kinds()["swiglu"]), legal(kinds()["norm_bwd_joined"])


def cases(m=M, device="cuda"):
    """(program, as_, bs, operands) of a pair and of a joined sum."""
    yield PAIR, *inputs(PAIR, m, N, K, device=device)
    yield JOINED, *inputs(JOINED, m, N, K, b_major="n", device=device, terms=2)


def apart(pair: list[torch.Tensor], gap: int, fill: float) -> list[torch.Tensor]:
    """Copies of two matrices in one buffer, with ``gap`` elements of ``fill`` before, between and
    after them."""
    size = pair[0].numel()
    buffer = torch.full((3 * gap + 2 * size,), fill, dtype=pair[0].dtype, device=pair[0].device)
    placed = []
    for i, x in enumerate(pair):
        flat = buffer[gap + i * (size + gap) :][:size]
        view = flat.as_strided(x.shape, x.stride(), flat.storage_offset())
        placed.append(view.copy_(x))
    return placed


@pytest.mark.parametrize("gap", [8, 4096])
def test_what_lies_between_two_operands_is_never_read(gap):
    for program, as_, bs, operands in cases():
        left = apart(as_, gap, float("nan")) if len(as_) > 1 else as_
        outputs = check(program, left, apart(bs, gap, float("nan")), operands)
        assert all(x.isfinite().all() for x in outputs)


@pytest.mark.parametrize("segments", ["expandable_segments:True", "expandable_segments:False"])
@pytest.mark.parametrize("caching", ["0", "1"])
def test_operands_at_the_end_of_their_allocations(segments, caching, tmp_path):
    """Without the caching allocator each tensor is an allocation, which the memory checker knows
    the end of."""
    checker = shutil.which("compute-sanitizer") if caching == "0" else None
    # Libraries ask the driver for what it may not have: an error code that they handle is none.
    memcheck = [checker, "--report-api-errors", "no", "--error-exitcode", "9"] if checker else []
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": segments, "PYTHONPATH": _path()}
    if caching == "0":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    script = [sys.executable, str(HERE / "memory_edges.py")]
    done = subprocess.run(
        [*memcheck, *script], env=environment, capture_output=True, text=True, check=False
    )
    lines = [x for x in (done.stdout + done.stderr).splitlines() if "Host Frame" not in x]
    assert done.returncode == 0, "\n".join(lines[:60])


def _path() -> str:
    folders = [HERE.parents[1], HERE, HERE.parent, os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(map(str, folders))


def agree(run, model, *xs):
    with torch.no_grad():
        have, want = run(*xs), model(*xs)
        exact = model.double()(*(x.double() for x in xs))
        model.bfloat16()
    for ours, theirs in zip(errors(have, exact), errors(want, exact), strict=True):
        assert ours <= 1.2 * theirs


def example(device="cuda"):
    return [torch.randn(264, 256, device=device).bfloat16() for _ in range(2)]


@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["calls", "replays"])
def test_parameters_move_between_calls(options):
    model = make()
    run = compiled(model, **options)

    def new_storage():
        for p in model.parameters():
            p.data = torch.randn_like(p.data) * p.data.float().std()

    def there_and_back():
        model.cpu()
        torch.cuda.empty_cache()
        model.cuda()

    def churn():
        keep = [torch.randn(2**20, device="cuda") for _ in range(8)]
        del keep[::2]
        torch.cuda.empty_cache()

    for change in (churn, new_storage, there_and_back, churn):
        for _ in range(3):
            agree(run, model, *example())
        change()
    agree(run, model, *example())


def test_more_than_two_thousand_million_results():
    program = kinds()["scale"]
    m, n, k = 65536 + 8, 32768 + 8, 64
    (a,), (b,), (scale,) = inputs(program, m, n, k, device="cuda")
    (out,) = launched([a], [b], [scale], program, config_for(program))
    for rows in (slice(0, 8), slice(32767, 32775), slice(m - 8, m)):
        exact = (a[rows].float() @ b.float()) * scale[rows, None]
        torch.testing.assert_close(out[rows].float(), exact, rtol=2**-8, atol=1e-3)
