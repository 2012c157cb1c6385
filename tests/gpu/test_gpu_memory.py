# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie, and what happens to them between calls: kernels that read two allocations as
one operand must neither touch what is between them nor hold on to an address."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layers import agree, compiled, make
from oracle import NEEDS_KERNELS, check, config_for, launched
from programs import inputs, kinds, legal

pytestmark = [*NEEDS_KERNELS, pytest.mark.usefixtures("fresh")]
HERE = Path(__file__).parent
M, N, K = 129, 264, 64
PAIR, JOINED = legal(kinds()["swiglu"]), legal(kinds()["norm_bwd_joined"])


def apart(pair: list[torch.Tensor], gap: int) -> list[torch.Tensor]:
    """Copies of two matrices in one buffer, with ``gap`` NaNs before, between and after them."""
    size = pair[0].numel()
    buffer = torch.full((3 * gap + 2 * size,), torch.nan, dtype=pair[0].dtype, device="cuda")
    placed = []
    for i, x in enumerate(pair):
        flat = buffer[gap + i * (size + gap) :][:size]
        view = flat.as_strided(x.shape, x.stride(), flat.storage_offset())
        placed.append(view.copy_(x))
    return placed


@pytest.mark.parametrize("gap", [8, 4096])
def test_what_lies_between_two_operands_is_never_read(gap):
    for program, how in ((PAIR, {}), (JOINED, {"b_major": "n", "terms": 2})):
        as_, bs, operands = inputs(program, M, N, K, device="cuda", **how)
        left = apart(as_, gap) if len(as_) > 1 else as_
        outputs = check(program, left, apart(bs, gap), operands)
        assert all(x.isfinite().all() for x in outputs)


@pytest.mark.parametrize("name", ["PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_CUDA_ALLOC_CONF"])
def test_operands_at_the_end_of_their_allocations(name):
    """Without the caching allocator each tensor is an allocation, which the memory checker knows
    the end of."""
    cached = name == "PYTORCH_CUDA_ALLOC_CONF"
    checker = None if cached else shutil.which("compute-sanitizer")
    # Libraries ask the driver for what it may not have: an error code that they handle is none.
    memcheck = [checker, "--report-api-errors", "no", "--error-exitcode", "9"] if checker else []
    folders = [HERE.parents[1], HERE, HERE.parent, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    environment[name] = "expandable_segments:True" if cached else "1"
    command = [*memcheck, sys.executable, str(HERE / "memory_edges.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [x for x in (done.stdout + done.stderr).splitlines() if "Host Frame" not in x]
    assert done.returncode == 0, "\n".join(lines[:60])


def test_parameters_move_between_replays():
    model = make()
    run = compiled(model, **{"triton.cudagraphs": True})

    def new_storage():
        for p in model.parameters():
            p.data = torch.randn_like(p.data) * p.data.float().std()

    def there_and_back():
        model.cpu()
        torch.cuda.empty_cache()
        model.cuda()

    for change in (new_storage, there_and_back, lambda: None):
        for _ in range(3):
            agree(run, model, *(torch.randn(264, 256, device="cuda").bfloat16() for _ in range(2)))
        change()


def test_more_than_two_thousand_million_results():
    program = kinds()["scale"]
    m, n, k = 65536 + 8, 32768 + 8, 64
    (a,), (b,), (scale,) = inputs(program, m, n, k, device="cuda")
    (out,) = launched([a], [b], [scale], program, config_for(program))
    for rows in (slice(0, 8), slice(32767, 32775), slice(m - 8, m)):
        exact = (a[rows].float() @ b.float()) * scale[rows, None]
        torch.testing.assert_close(out[rows].float(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("b_major", ["n", "k"])
def test_as_if_concatenated_in_every_order(monkeypatch, b_major):
    concatenate, program = torch.cat, kinds()["norm_bwd"]
    monkeypatch.setattr(torch, "cat", lambda *args: pytest.fail("the terms were copied"))
    for m, k, left, right in itertools.product((1, 1021), (64, 8192), (1, -1), (1, -1)):
        as_, bs, operands = inputs(program, m, N, k, b_major=b_major, device="cuda", terms=2)
        as_ = sorted(as_, key=torch.Tensor.data_ptr)[::left]
        bs = sorted(bs, key=torch.Tensor.data_ptr)[::right]
        got = check(program, as_, bs, operands)
        # Wherever they lie, the kernel starts with the first: so the same bits.
        whole_a, whole_b = concatenate(as_, 1), concatenate(bs, 0)
        whole_b = whole_b.t().contiguous().t() if b_major == "k" else whole_b
        whole = launched([whole_a], [whole_b], operands, program, config_for(program))
        torch.testing.assert_close(got, whole, rtol=0, atol=0)
