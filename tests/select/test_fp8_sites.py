# SPDX-License-Identifier: Apache-2.0
"""FP8 sites: which configs, what they are expected to take, and reasons for having no kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from programs import E5M2, fp8, kinds, residual, stored
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from coda_inductor.mainloop import availability
from coda_inductor.options import parse
from coda_inductor.plan import Plan
from coda_inductor.program import Operand, Step, Store
from coda_inductor.select.choice import select
from coda_inductor.select.config import legal_configs, mainloop_stages
from coda_inductor.select.device import H100
from coda_inductor.select.figures import key_of
from coda_inductor.select.legality import unsupported
from coda_inductor.select.roofline import around_us, product_us
from coda_inductor.select.site import Site
from coda_inductor.tune.inputs import tensors

KNOWN = fp8()
M, N, K = 8192, 14336, 4096


@pytest.mark.parametrize("name", list(KNOWN))
def test_every_representative_program_is_supported(name):
    assert unsupported(KNOWN[name], N, K) is None
    configs = legal_configs(KNOWN[name])
    assert configs
    assert all(mainloop_stages(KNOWN[name], config) >= 2 for config in configs)
    chosen = select(Site(KNOWN[name], M, N, K), gated=False).config
    assert chosen == str(configs[0]) or "half" in name


def test_slow_accumulation_has_no_room_for_larger_tiles():
    slow = {(c.tile_m, c.tile_n, c.pingpong) for c in legal_configs(KNOWN["fp8_residual"])}
    fast = {(c.tile_m, c.tile_n) for c in legal_configs(KNOWN["fp8_residual_fast"])}
    assert slow == {(128, 128, False)}
    assert {(128, 128), (128, 256)} < fast
    twins = {str(c.dynamic_twin()) for c in legal_configs(KNOWN["fp8_swiglu"])}
    assert twins <= {str(c) for c in legal_configs(KNOWN["fp8_swiglu"])}


@pytest.mark.parametrize(
    ("change", "n", "k", "how", "code", "text"),
    [
        ({}, 72, 64, {}, "not-multiple-of-16", "N=72 and K=64"),
        ({}, 64, 72, {}, "not-multiple-of-16", "N=64 and K=72"),
        ({"a_dtype": "bfloat16", "b_dtype": "bfloat16"}, 72, 64, {}, "not-multiple-of-16", "N=72"),
        ({}, 64, 64, {"a_major": "m"}, "fp8-layout", "left operand is contiguous along M"),
        ({}, 64, 64, {"b_major": "n"}, "fp8-layout", "right operand is contiguous along N"),
        ({}, 64, 64, {"terms": 2}, "fp8-terms", "a sum of 2 FP8 products"),
    ],
)
def test_reasons(change, n, k, how, code, text):
    why = unsupported(replace(stored(), **change), n, k, **how)
    assert (why.code, why.failure) == (code, True)
    assert text in why.text


def test_mixed_dtypes_have_no_kernel_on_data_centre_blackwell(monkeypatch):
    mixed = replace(stored(), a_dtype=E5M2)
    assert unsupported(mixed, 64, 64) is None
    for arch, code in ((10, "fp8-mixed"), (12, None)):
        monkeypatch.setattr("coda_inductor.select.legality.arch_of", lambda _, arch=arch: arch)
        why = unsupported(mixed, 64, 64)
        assert (why and why.code) == code


@pytest.mark.parametrize("name", ["fp8_residual", "fp8_swiglu", "fp8_dswiglu"])
def test_sites_of_a_llama_are_fused_by_default(name):
    found = select(Site(KNOWN[name], M, N, K), gated=True)
    assert (found.how, found.ground) == ("kernel", "roofline")
    half = replace(KNOWN[name], a_dtype="bfloat16", b_dtype="bfloat16", fast=False)
    twice = select(Site(half, M, N, K), gated=True)
    assert found.fused_us < 0.7 * twice.fused_us


def test_scales_alone_are_cublas_own_work():
    steps = KNOWN["fp8_residual"].steps[:2]
    alone = replace(
        residual(), steps=steps, operands=residual().operands[:2],
        stores=(Store("out0", "y", "bfloat16"),), reduces=(),
    )  # fmt: skip
    site = Site(alone, M, N, K)
    assert around_us(site, H100) == 0
    found = select(site, gated=True)
    assert found.refusal.code == "expected-slower"
    assert found.unfused_us == product_us(M, N, K, H100, fp8=True)
    bias = Operand("bias", "row", "bfloat16")
    biased = replace(
        alone, steps=(*steps, Step("z", "add", ("y", "bias"))),
        operands=(*alone.operands, bias), stores=(Store("out0", "z", "bfloat16"),),
    )  # fmt: skip
    # cuBLAS writes the product, and a kernel reads it and writes the sum: 4 bytes an element.
    moved = M * N * 4 / H100.bytes_per_us + H100.launch_us
    assert around_us(Site(biased, M, N, K), H100) == pytest.approx(moved)


def test_measurements_are_of_both_dtypes_and_the_accumulation():
    program = stored()
    others = [replace(program, b_dtype=E5M2), replace(program, fast=True), program]
    assert len({key_of(Site(p, M, N, K)) for p in others}) == 3


def test_keys_of_what_was_measured_before_fp8_stay():
    """Shipped and users' measurements are found by them."""
    assert kinds()["scale"].key == "6b42c26078914043"
    assert kinds("float16")["scale"].key != kinds()["scale"].key


@pytest.mark.parametrize("name", ["fp8_dswiglu", "fp8_swiglu"])
def test_tensors_to_measure_with(name):
    program = KNOWN[name]
    (a,), bs, operands = tensors(Site(program, 48, 64, 512), "cpu")
    names = [o.name for o in program.operands]
    assert a.dtype == getattr(torch, program.a_dtype)
    assert {b.dtype for b in bs} == {getattr(torch, program.b_dtype)}
    assert (a.stride(), bs[0].stride()) == ((512, 1), (1, 512))
    product = (a.float() @ bs[0].float()) * operands[names.index("inv_a")][:, None]
    assert 0.3 < product.std() < 3
    assert (bs[0] == torch.zeros((), dtype=bs[0].dtype)).float().mean() < 0.05


def plan_of(a, b, monkeypatch, op=torch.ops.aten.mm.default):
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    graph = Graph()
    with FakeTensorMode():
        nodes = [graph.placeholder(name) for name in "ab"]
        for node, (shape, stride, dtype) in zip(nodes, (a, b), strict=True):
            node.meta["val"] = torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
    gemm = graph.call_function(op, tuple(nodes))
    return Plan.of(parse(None, {}), graph), gemm


@pytest.mark.parametrize(
    ("dtypes", "b_stride", "why"),
    [
        ((torch.float8_e4m3fn, torch.float8_e5m2), (1, K), None),
        ((torch.float8_e4m3fn, torch.float8_e4m3fn), (1, K), None),
        ((torch.float8_e4m3fn, torch.float8_e4m3fn), (N, 1), "contiguous along N"),
        ((torch.float8_e4m3fn, torch.bfloat16), (1, K), "has no epilogue program"),
        ((torch.float8_e4m3fnuz,) * 2, (1, K), "has no epilogue program"),
    ],
)
def test_which_gemms_may_be_fused(dtypes, b_stride, why, monkeypatch):
    plan, gemm = plan_of(((M, K), (K, 1), dtypes[0]), ((K, N), b_stride, dtypes[1]), monkeypatch)
    found = plan.legal(gemm)
    assert found is None if why is None else why in found.text


def test_a_gemm_alone_is_expected_to_take_less_than_in_bfloat16(monkeypatch):
    shape = ((M, K), (K, 1)), ((K, N), (1, K))
    half, gemm = plan_of(*((*x, torch.bfloat16) for x in shape), monkeypatch)
    plain = half.estimate_plain(gemm)
    eight, gemm = plan_of(*((*x, torch.float8_e4m3fn) for x in shape), monkeypatch)
    found = eight.estimate_plain(gemm)
    assert plain.ground == found.ground == "roofline"
    assert found.unfused_us < 0.7 * plain.unfused_us


def test_a_graph_of_fp8_gemms_is_bound_by_the_host_at_twice_the_size(monkeypatch):
    """Its GEMMs take half as long, launching them does not."""
    shape = ((3072, 4096), (4096, 1)), ((4096, 4096), (1, 4096))
    half, _ = plan_of(*((*x, torch.bfloat16) for x in shape), monkeypatch)
    eight, _ = plan_of(*((*x, torch.float8_e4m3fn) for x in shape), monkeypatch)
    assert half.too_small is None
    assert "too small" in eight.too_small.text


def test_a_graph_whose_gemms_are_all_scaled_is_decided_as_one_of_a_gpu(monkeypatch):
    """The plan is made before scaled products are raised."""
    eight = [((M, K), (K, 1), torch.float8_e4m3fn), ((K, N), (1, K), torch.float8_e4m3fn)]
    plan, _ = plan_of(*eight, monkeypatch, torch.ops.aten._scaled_mm.default)
    assert plan.on_gpu
    assert plan.store is not None
