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
from oracle import ARCH, NEEDS_KERNELS, check, config_for, launched
from programs import inputs, kinds, legal

from coda_inductor.select.config import legal_configs

pytestmark = [*NEEDS_KERNELS, pytest.mark.usefixtures("fresh")]
HERE = Path(__file__).parent
M, N, K = 129, 264, 64
PAIR, JOINED = legal(kinds()["swiglu"]), legal(kinds()["norm_bwd_joined"])


def cases(m=M, device="cuda"):
    """(program, as_, bs, operands) of a pair and of a joined sum."""
    yield PAIR, *inputs(PAIR, m, N, K, device=device)
    yield JOINED, *inputs(JOINED, m, N, K, b_major="n", device=device, terms=2)


def apart(pair: list[torch.Tensor], gap: int, fill: float) -> list[torch.Tensor]:
    """Copies of two matrices in one buffer, with ``gap`` elements of ``fill`` around each."""
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
    """Without the caching allocator each tensor is an allocation, whose end memcheck knows."""
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


ORDERS = [(a, b) for a in (1, -1) for b in (1, -1)]


def terms(m: int, k: int, b_major: str = "n"):
    """(program, as_, bs, operands) with A and B both in the order of their addresses."""
    program = kinds()["norm_bwd"]
    as_, bs, operands = inputs(program, m, N, k, b_major=b_major, device="cuda", terms=2)
    as_.sort(key=torch.Tensor.data_ptr)
    bs.sort(key=torch.Tensor.data_ptr)
    return program, as_, bs, operands


@pytest.fixture
def in_place(monkeypatch):
    """Nothing may be concatenated; returns torch.cat for the test itself."""
    concatenate = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *args: pytest.fail("the terms were copied"))
    return concatenate


@pytest.mark.parametrize("b_major", ["n", "k"])
def test_as_if_concatenated_in_every_order(in_place, b_major):
    for m, k, (left, right) in itertools.product((1, 300, 1021), (64, 192, 8192), ORDERS):
        program, as_, bs, operands = terms(m, k, b_major)
        as_, bs = as_[::left], bs[::right]
        got = check(program, as_, bs, operands)
        # Wherever they lie, the kernel starts with the first: so the same bits.
        whole_a, whole_b = in_place(as_, 1), in_place(bs, 0)
        whole_b = whole_b.t().contiguous().t() if b_major == "k" else whole_b
        whole = launched([whole_a], [whole_b], operands, program, config_for(program))
        torch.testing.assert_close(got, whole, rtol=0, atol=0)


def test_halves_of_one_buffer_and_allocations_far_apart(in_place):
    program, as_, bs, operands = terms(300, 192)
    both = in_place(as_, 1)
    halves = [both[:, :192], both[:, 192:]]
    gap = torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")  # beyond 32-bit distances
    far = bs[1].clone()
    del gap
    for right in ([bs[0], far], [far, bs[0]]):
        check(program, halves, right, operands)
        check(program, halves[::-1], right, operands)


@pytest.mark.parametrize("order", [1, -1])
def test_a_captured_call_may_find_its_tensors_in_the_other_order(in_place, order):
    """Each case has a config of its own: a kernel that has been launched is loaded."""
    program, as_, bs, operands = terms(500, 256)
    config = legal_configs(program, ARCH)[order]
    first, second = as_[::-order], as_[::order]
    launched(first, bs, operands, program, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launched(second, bs, operands, program, config)
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(captured, launched(second, bs, operands, program, config), strict=True):
        assert torch.equal(x, y)
