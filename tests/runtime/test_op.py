# SPDX-License-Identifier: Apache-2.0
"""The custom op on a CPU: schema, shapes, the reference path; which kernels a call may launch, and
what becomes of one that has none."""

import contextlib
import sys
import time
import types

import pytest
import torch
from checking import leave_custom_ops
from programs import E4M3, E5M2, fp8, inputs, kinds, paired_sums, parsed, programs, rotary
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo.layers import Mlp

from coda_inductor.backend import coda
from coda_inductor.errors import KernelError
from coda_inductor.mainloop.readings import pair
from coda_inductor.program import Store, reference
from coda_inductor.runtime import launch, op
from coda_inductor.runtime.launch import Kernel, requests
from coda_inductor.runtime.op import gemm_epilogue
from coda_inductor.select.config import Config

CONFIG, SQUARE = Config(128, 160, 2, 1, True), Config(128, 128, 2, 1, True)
M, N, K = 300, 264, 64
NARROW, WIDE = 64, 96
SUM = kinds()["norm_bwd"]


def both_reductions(dtype: str = "bfloat16"):
    return parsed(dtype, "bias:row", "x add acc bias", "x", "rows:x cols:x:col:max")


CHECKED = [
    *((program, (M, N, K)) for program in (both_reductions(), paired_sums(), rotary(24))),
    (fp8()["fp8_dswiglu"], (M, NARROW, WIDE)),
]


@pytest.mark.parametrize(("program", "sizes"), CHECKED)
def test_opcheck(program, sizes):
    arguments = (*inputs(program, *sizes), program.to_json(), str(CONFIG))
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests += ["test_aot_dispatch_dynamic"]
    if program.fp8:  # torch compares no tensors of it
        tests = tests[1:3]
    torch.library.opcheck(op.OP, arguments, test_utils=tests)


@pytest.mark.parametrize(("name", "m"), [("norm_bwd", 0), *((name, M) for name in programs())])
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
    want = reference.run(program, [a], bs, operands)
    for output, have, alone in zip(
        program.outputs, reference.combined(program, outputs), want, strict=True
    ):
        same = torch.allclose if getattr(output, "combine", "") == "entropy" else torch.equal
        assert same(have, alone)


@pytest.mark.parametrize("name", list(fp8()))
def test_fp8_against_float64_within_the_rounding_of_the_stores(name):
    program = fp8()[name]
    as_, bs, operands = inputs(program, M, NARROW, WIDE)
    found = gemm_epilogue(as_, bs, operands, program, SQUARE)
    exact = reference.run(program, [as_[0].double()], [b.double() for b in bs], operands)
    digits = {"bfloat16": 8, E4M3: 4, E5M2: 3}
    for spec, x, y in zip(program.outputs, reference.combined(program, found), exact, strict=True):
        # A value between two numbers may round to either: the sums before it are float32's.
        step = 2.0 ** -digits[spec.dtype] if isinstance(spec, Store) else 2.0**-4
        torch.testing.assert_close(x.double(), y.double(), rtol=2 * step, atol=1e-4)


def test_the_op_sums_the_terms():
    as_, bs, operands = inputs(SUM, M, N, K, b_major="n", terms=2)
    dx, partials = gemm_epilogue(as_, bs, operands, SUM, CONFIG)
    residual, x, weight, coef = (o.float() for o in operands)
    acc = sum(a.float() @ b.float() for a, b in zip(as_, bs, strict=True))
    expected = acc * weight + x * coef[:, None] + residual
    torch.testing.assert_close(dx.float(), expected, atol=0.03, rtol=0.01)
    torch.testing.assert_close(partials.sum(0), (acc * x).sum(0), atol=2e-3, rtol=1e-4)


def asked(as_, bs, program=SUM):
    wanted = requests(as_, bs, program.to_json(), str(SQUARE))
    return [f"{r.a_major} {r.b_major} {r.variant}".strip() for r in wanted]


def test_requests_name_every_kernel_that_a_call_may_launch():
    with FakeTensorMode():
        a, at = torch.empty(M, K), torch.empty(K, M).t()
        b, w = torch.empty(K, N), torch.empty(N, K).t()
    a, at, b, w = (x.bfloat16() for x in (a, at, b, w))
    assert [*asked([a], [b]), *asked([a], [w]), *asked([at], [b])] == ["k n", "k k", "m n"]
    assert asked([a, a], [b, b]) == ["k n joined"]
    assert asked([a, a], [w, w]) == ["k k joined"]
    assert asked([a, at], [w, w]) == asked([a, a, a], [b, b, b]) == ["k n"]  # copied
    assert asked([a], [w, w], kinds()["swiglu"]) == ["k k", "k k swapped"]


@pytest.mark.parametrize("name", ["swiglu", "norm_bwd_joined"])
def test_both_orders_are_loaded_before_a_graph_is_captured(name, monkeypatch):
    """Where activations lie is known at the call; while one is captured nothing can be loaded."""
    program, built = kinds()[name], []
    paired = program.paired
    as_, bs, operands = inputs(program, M, N, K, b_major="nk"[paired], terms=2 - paired)
    build = types.SimpleNamespace(build=lambda *key, **_: built.append(key[-1]) or "plan")
    monkeypatch.setitem(sys.modules, "coda_inductor.mainloop.build", build)  # needs no library
    monkeypatch.setattr(launch, "_on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_run", lambda *_: None)
    monkeypatch.setattr(pair, "foreign_view", lambda *_: bs[0])
    kernel = Kernel(program, SQUARE)
    outputs = op._allocate(program, SQUARE, as_, bs, operands)
    for order in (1, -1):
        kernel.launch(as_, bs[::order], operands, outputs)
        assert sorted(built) == (["", "swapped"] if paired else ["joined"])


SITE = "layers.0.mlp.down_proj"
SCALE, STORED = kinds()["scale"], fp8()["fp8_residual"]
EIGHTS = (torch.float8_e4m3fn,) * 2


@pytest.mark.parametrize(("program", "dtypes", "more", "why"), [
    (SCALE, (torch.float16,) * 2, {}, "bfloat16 inputs, but they are torch.float16"),
    (fp8()["fp8_dswiglu"], EIGHTS, {}, f"for {E5M2} and {E4M3} inputs, but they are"),
    (STORED, EIGHTS, {"terms": 2}, "sum of 2 FP8 products"),
    (STORED, EIGHTS, {"k": WIDE + 8}, "multiples of 16"),
    (fp8()["fp8_swiglu"], EIGHTS, {"majors": ("k", "n")}, "along N"),
])  # fmt: skip
def test_what_no_launch_can_mend(program, dtypes, more, why, monkeypatch):
    monkeypatch.setattr(op.availability, "kernel_stack", lambda _: None)
    how = {"n": NARROW, "k": WIDE, "majors": ("k", "k"), "terms": 1, "device": None} | more
    found = op._unsupported.__wrapped__(program.to_json(), dtypes=dtypes, **how)
    assert found.failure
    assert why in found.text


@pytest.fixture
def call(monkeypatch, warned):
    """The CUDA path on CPU tensors, of a program whose kernels cannot be built."""
    launch.kernel.cache_clear()
    monkeypatch.setattr(op, "_unsupported", lambda *arguments: None)
    fails_with(monkeypatch, RuntimeError("no such instruction"))
    program = both_reductions()
    arguments = (*inputs(program, M, N, K), program.to_json(), str(CONFIG))
    expected = gemm_epilogue(*arguments)

    def run(*site):
        torch.testing.assert_close(op._cuda(*arguments, *site), expected, rtol=0, atol=0)

    return run


def fails_with(monkeypatch, error):
    """Building a kernel raises ``error``; gives the list of attempts."""
    builds = []

    def build(self, *key):
        builds.append(key)
        raise error

    monkeypatch.setattr(Kernel, "_build", build)
    return builds


def test_failed_kernel_falls_back_with_one_warning(call, warned, monkeypatch):
    """A launch that fails is tried again, in microseconds: the next call has other tensors."""
    for site in (SITE, SITE, "layers.1.mlp.down_proj"):  # one kernel, used twice
        call(site)
    (said,) = warned()
    assert SITE in said
    launches = []
    launch.kernel.cache_clear()
    monkeypatch.setattr(Kernel, "_build", lambda self, *key: self.plans.update({key: "plan"}))
    monkeypatch.setattr(launch, "_on_device", torch.device)
    monkeypatch.setattr(launch, "_run", lambda *_: launches.append(1) or 1 / 0)
    for _ in range(2):
        call()
    assert len(launches) == 2


FULL_DISK = OSError("No space left on device")


@pytest.mark.parametrize(
    ("error", "counts"), [(torch.OutOfMemoryError("no room"), (2, 4, 6)), (FULL_DISK, (1, 2, 2))]
)
def test_what_may_pass_is_tried_again_and_less_and_less_often(call, monkeypatch, error, counts):
    """Out of memory at each call; else after a minute, then two, and when something is compiled:
    whoever compiles may have mended the cause."""
    builds = fails_with(monkeypatch, error)
    now = time.monotonic()
    for later, count in zip((0, 61, 122), counts, strict=True):
        monkeypatch.setattr(launch.time, "monotonic", lambda later=later: now + later)
        for _ in range(2):
            call()
        assert len(builds) == count
    torch.compile(torch.sin, backend=coda)(torch.ones(2))
    call()
    assert len(builds) == counts[-1] + 1


@pytest.fixture
def on_gpu(call, monkeypatch):
    """Fused sites stay calls, and CPU tensors go where CUDA tensors go while "on" is in the set."""
    leave_custom_ops(monkeypatch)
    on = {"on"}
    library = torch.library.Library("coda_inductor", "IMPL")

    def implementation(*arguments):
        return (op._cuda if on else op._reference)(*arguments)

    library.impl("gemm_epilogue", implementation, "CPU")
    yield on
    library._destroy()


def test_strictness_is_the_compiled_graphs(on_gpu):
    """Compiling one model leaves the other; so do backward graphs, on autograd's own threads."""
    x = torch.randn(16, 64, requires_grad=True)
    models = {
        strict: torch.compile(Mlp(64, 128, "tanh"), backend=coda, options={"strict": strict})
        for strict in (False, True)
    }
    for strict in (False, True, False, True):
        on_gpu.clear()
        loss = models[strict](x).sum()
        on_gpu.add("on")
        with pytest.raises(KernelError) if strict else contextlib.nullcontext():
            loss.backward()
