# SPDX-License-Identifier: Apache-2.0
"""The custom op on a CPU: schema, shapes, the reference path; and how weights are paired."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from checking import leave_custom_ops
from programs import E4M3, E5M2, fp8, inputs, kinds, paired_sums, programs, rotary

from coda_inductor.backend import coda
from coda_inductor.errors import KernelError
from coda_inductor.log import forget_warnings
from coda_inductor.mainloop.readings import reading_of
from coda_inductor.mainloop.readings.pair import pair_order
from coda_inductor.mainloop.tensors import UnpairableError, tma_matrix, vector
from coda_inductor.program import EpilogueProgram, Operand, Reduce, Step, Store, reference
from coda_inductor.runtime import launch, op
from coda_inductor.runtime.launch import Kernel, requests
from coda_inductor.runtime.op import gemm_epilogue
from coda_inductor.select.config import Config

CONFIG = Config(128, 160, 2, 1, True)
M, N, K = 300, 264, 64


def both_reductions(dtype: str) -> EpilogueProgram:
    return EpilogueProgram(
        accs=("acc",),
        a_dtype=dtype,
        operands=(Operand("bias", "row", dtype),),
        steps=(Step("x", "add", ("acc", "bias")),),
        stores=(Store("out0", "x", dtype),),
        reduces=(Reduce("rows", "x"), Reduce("cols", "x", "col", "max")),
    )


def rotated(dtype):
    """N and M are no multiples of a tile, N is one of a head."""
    return rotary(24, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("make", [both_reductions, paired_sums, rotated])
def test_opcheck(make, dtype):
    program = make(dtype)
    arguments = (*inputs(program, M, N, K), program.to_json(), str(CONFIG))
    torch.library.opcheck(torch.ops.coda_inductor.gemm_epilogue.default, arguments)


@pytest.mark.parametrize("m", [0, 1, 300])
@pytest.mark.parametrize("name", list(programs()))
def test_partials_stand_in_the_first_tile(name, m):
    program = programs()[name]
    (a,), bs, operands = inputs(program, m, N, K)
    outputs = gemm_epilogue([a], bs, operands, program, CONFIG)
    width = 2 * N if program.paired else N
    for spec, output in zip(program.outputs, outputs, strict=True):
        if isinstance(spec, Store):
            assert output.shape == (m, N)
            assert output.dtype == getattr(torch, spec.dtype)
        else:
            tiles = (m, -(-width // 160)) if spec.axis == "row" else (-(-m // 128), N)
            assert output.shape == tiles
            assert output.dtype == torch.float32
    if m == 0:
        return
    for spec, output, value in zip(
        program.outputs, outputs, reference.run(program, [a], bs, operands), strict=True
    ):
        if isinstance(spec, Reduce):
            dim = 1 if spec.axis == "row" else 0
            folded = output.sum(dim) if spec.combine == "add" else output.amax(dim)
            assert torch.equal(folded, value.squeeze(dim))
        else:
            assert torch.equal(output, value)


SITE = "layers.0.mlp.down_proj"


@pytest.fixture
def broken(monkeypatch):
    """The CUDA path with kernels that cannot be built, run on CPU tensors; gives a program."""
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(op, "_unsupported", lambda *arguments: None)
    fails_with(monkeypatch, RuntimeError("no such instruction"))
    forget_warnings()
    yield both_reductions("bfloat16")
    forget_warnings()


def fails_with(monkeypatch, error):
    """Building a kernel raises ``error``; gives the list of attempts."""
    builds = []

    def build(self, *key):
        builds.append(key)
        raise error

    monkeypatch.setattr(Kernel, "_build", build)
    return builds


def test_failed_kernel_falls_back_with_one_warning(broken, caplog):
    arguments = (*inputs(broken, M, N, K), broken.to_json(), str(CONFIG))
    expected = gemm_epilogue(*arguments[:3], broken, CONFIG)
    with caplog.at_level(logging.WARNING, "coda_inductor"):
        for site in (SITE, SITE, "layers.1.mlp.down_proj"):  # one kernel, used twice
            for x, y in zip(op._cuda(*arguments, site), expected, strict=True):
                assert torch.equal(x, y)
    (said,) = caplog.messages
    assert broken.key in said
    assert SITE in said
    assert "no such instruction" in said


FULL_DISK = OSError("No space left on device")


@pytest.mark.parametrize(
    ("error", "counts"), [(torch.OutOfMemoryError("no room"), (2, 4, 6)), (FULL_DISK, (1, 2, 2))]
)
def test_what_may_pass_is_tried_again_and_less_and_less_often(broken, monkeypatch, error, counts):
    """Out of memory at each call; else after a minute, then two."""
    builds = fails_with(monkeypatch, error)
    arguments = (*inputs(broken, M, N, K), broken.to_json(), str(CONFIG))
    now = time.monotonic()
    for later, count in zip((0, 61, 122), counts, strict=True):
        monkeypatch.setattr(launch.time, "monotonic", lambda later=later: now + later)
        for _ in range(2):
            op._cuda(*arguments)
        assert len(builds) == count


def test_a_launch_that_fails_is_tried_again(broken, monkeypatch):
    """It costs microseconds, and the next call has other tensors."""
    launches = []
    monkeypatch.setattr(Kernel, "_build", lambda self, *key: self._plans.update({key: "plan"}))
    monkeypatch.setattr(launch, "_on_device", torch.device)
    monkeypatch.setattr(launch, "_quack_launcher", lambda: lambda *_: launches.append(1) or 1 / 0)
    arguments = (*inputs(broken, M, N, K), broken.to_json(), str(CONFIG))
    expected = gemm_epilogue(*arguments[:3], broken, CONFIG)
    for _ in range(2):
        assert torch.equal(op._cuda(*arguments)[0], expected[0])
    assert len(launches) == 2


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 128, bias=False)
        self.down = torch.nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))


@pytest.fixture
def on_gpu(broken, monkeypatch):
    """Fused sites stay calls, and CPU tensors go where CUDA tensors go while "on" is in the set."""
    leave_custom_ops(monkeypatch)
    on = {"on"}
    library = torch.library.Library("coda_inductor", "IMPL")

    def call(*arguments):
        return (op._cuda if on else op._reference)(*arguments)

    library.impl("gemm_epilogue", call, "CPU")
    yield on
    library._destroy()


@pytest.mark.parametrize(
    ("direction", "first"), [("forward", "strict"), ("backward", "lenient"), ("backward", "strict")]
)
def test_strictness_is_the_compiled_graphs(on_gpu, first, direction):
    """Compiling one model changes nothing for the other, whichever is compiled first; backward
    graphs, which run on autograd's own threads, too."""
    x = torch.randn(16, 64, requires_grad=True)

    def runs(model):
        on_gpu.clear()
        if direction == "forward":
            on_gpu.add("on")
        loss = model(x).sum()
        on_gpu.add("on")
        loss.backward()

    models = {
        name: torch.compile(Mlp(), backend=coda, options={"strict": name == "strict"})
        for name in dict.fromkeys((first, "strict", "lenient"))
    }
    for name in (*models, *models):
        if name == "lenient":
            runs(models[name])
        else:
            with pytest.raises(KernelError, match=r"program \w+ at .*(up|down).*such instruction"):
                runs(models[name])


def test_a_compilation_tries_failed_kernels_again(broken, monkeypatch):
    """Whoever compiles may have mended the cause."""
    builds = fails_with(monkeypatch, RuntimeError("no such instruction"))
    arguments = (*inputs(broken, M, N, K), broken.to_json(), str(CONFIG))
    for count in (1, 1):
        op._cuda(*arguments)
        assert len(builds) == count
    torch.compile(torch.sin, backend=coda)(torch.ones(2))
    op._cuda(*arguments)
    assert len(builds) == 2


def test_pair_order_and_distance():
    both = torch.zeros(2 * N, K, dtype=torch.bfloat16)
    low, high = both[:N].t(), both[N:].t()
    assert pair_order(low, high) == (False, N * K)
    assert pair_order(high, low) == (True, N * K)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (lambda b: b, "stride apart"),
        (lambda b: torch.zeros(N + 8, K, dtype=b.dtype).t(), "differ in shape"),
        (lambda b: torch.zeros(N, K, dtype=torch.float16).t(), "dtype"),
        (lambda b: torch.zeros(K, N, dtype=b.dtype), "strides"),
        (lambda b: torch.zeros(N * K + 4, dtype=b.dtype)[4:].view(N, K).t(), "stride apart"),
    ],
)
def test_weights_that_cannot_be_paired(second, why):
    first = torch.zeros(N, K, dtype=torch.bfloat16).t()
    with pytest.raises(UnpairableError, match=why):
        pair_order(first, second(first))


def test_only_what_tma_cannot_read_is_copied():
    x = torch.randn(48, 64).to(torch.bfloat16)
    assert tma_matrix(x) is x
    assert tma_matrix(x[:, :40]).data_ptr() == x.data_ptr()
    transposed = x.t()
    assert tma_matrix(transposed, either_major=True) is transposed
    one_row = x.as_strided((1, 64), (1, 1))
    copied = [x[:, 1:], x[:, ::2], x[:1].expand(48, 64), transposed, x[:, :60][:, 4:], one_row]
    for view in copied:
        ready = tma_matrix(view)
        assert ready.data_ptr() != view.data_ptr()
        assert ready.stride() == (view.shape[1], 1)
        assert torch.equal(ready, view)
    row = x[0]
    assert vector(row) is row
    for view in (row[1:], x[:, 0], row[:1].expand(64)):
        assert vector(view).stride() == (1,)
        assert vector(view).data_ptr() % 16 == 0
        assert torch.equal(vector(view), view)


SQUARE = Config(128, 128, 2, 1, False)
NARROW, WIDE = 64, 96


@pytest.mark.parametrize("name", list(fp8()))
def test_opcheck_of_fp8(name):
    program = fp8()[name]
    arguments = (*inputs(program, M, NARROW, WIDE), program.to_json(), str(SQUARE))
    # Torch compares no FP8 tensors, which its test of the schema needs.
    tests = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.coda_inductor.gemm_epilogue.default, arguments, test_utils=tests
    )


@pytest.mark.parametrize("name", list(fp8()))
def test_against_float64_within_the_rounding_of_the_stores(name):
    program = fp8()[name]
    as_, bs, operands = inputs(program, M, NARROW, WIDE)
    found = gemm_epilogue(as_, bs, operands, program, SQUARE)
    exact = reference.run(program, [as_[0].double()], [b.double() for b in bs], operands)
    digits = {"bfloat16": 8, E4M3: 4, E5M2: 3}
    for spec, output, y in zip(program.outputs, found, exact, strict=True):
        x = output
        if not isinstance(spec, Store):
            x = reference.COMBINE[spec.combine](x, 1 if spec.axis == "row" else 0, keepdim=True)
        # A value between two numbers may round to either: the sums before it are float32's.
        step = 2.0 ** -digits[spec.dtype] if isinstance(spec, Store) else 2.0**-4
        torch.testing.assert_close(x.double(), y.double(), rtol=2 * step, atol=1e-4)


@pytest.mark.parametrize("a_row_major", [True, False])
@pytest.mark.parametrize("b_row_major", [True, False])
def test_operands_that_are_not_contiguous_along_k_are_copied(a_row_major, b_row_major):
    program = fp8()["fp8_stored"]
    (a,), (b,), _ = inputs(program, M, NARROW, WIDE)
    given = a if a_row_major else a.t().contiguous().t()
    other = b.contiguous() if b_row_major else b
    got = reading_of(program).bind([given], [other])
    assert (got[0].stride(), got[1].stride()) == ((WIDE, 1), (1, WIDE))
    assert torch.equal(got[0].float(), a.float())
    assert torch.equal(got[1].float(), b.float())
    assert (got[0] is given, got[1].data_ptr() == other.data_ptr()) == (
        a_row_major,
        not b_row_major,
    )
    (request,) = requests([given], [other], program.to_json(), str(SQUARE))
    assert (request.a_major, request.b_major) == ("k", "k")


def test_a_pair_has_distances_of_16_bytes():
    both = torch.zeros(2 * NARROW, WIDE, dtype=torch.float8_e4m3fn)
    assert pair_order(both[:NARROW].t(), both[NARROW:].t()) == (False, NARROW * WIDE)
    odd = torch.zeros(2 * NARROW, WIDE + 8, dtype=torch.float8_e4m3fn)[:, :WIDE]
    with pytest.raises(UnpairableError, match="16-byte rows"):
        pair_order(odd[:NARROW].t(), odd[NARROW:].t())
    shifted = both.flatten()[8 : 8 + NARROW * WIDE].view(NARROW, WIDE)
    with pytest.raises(UnpairableError, match="TMA stride"):
        pair_order(both[:NARROW].t(), shifted.t())


def unsupported(program, dtypes, n=NARROW, k=WIDE, b_major="k", terms=1):
    return op._unsupported(program.to_json(), n, k, dtypes, ("k", b_major), terms, None)


def test_unsupported_names_the_dtypes():
    program = kinds()["scale"]
    why = unsupported(program, (torch.float16,) * 2)
    assert why.failure
    assert why.text == "the program is for bfloat16 inputs, they are torch.float16"
    program = fp8()["fp8_dswiglu"]
    why = unsupported(program, (torch.float8_e4m3fn, torch.float8_e5m2))
    assert why.text == (
        f"the program is for {E5M2} and {E4M3} inputs, "
        "they are torch.float8_e4m3fn and torch.float8_e5m2"
    )


def test_what_no_launch_can_mend(monkeypatch):
    monkeypatch.setattr(op.availability, "kernel_stack", lambda _: None)
    op._unsupported.cache_clear()
    dtypes = (torch.float8_e4m3fn,) * 2
    program = fp8()["fp8_residual"]
    assert "sum of 2 FP8 products" in unsupported(program, dtypes, terms=2).text
    assert "multiples of 16" in unsupported(program, dtypes, k=WIDE + 8).text
    assert "along N" in unsupported(fp8()["fp8_swiglu"], dtypes, b_major="n").text
    op._unsupported.cache_clear()
