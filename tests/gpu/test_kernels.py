# SPDX-License-Identifier: Apache-2.0
"""Generated kernels on a GPU against the reference executor."""

from __future__ import annotations

import pytest
import torch
from oracle import NEEDS_KERNELS, build, check, config_for, launched
from programs import B_MAJOR, TERMS, inputs, kinds, one_op, programs

from coda_inductor.mainloop.readings import reading_of
from coda_inductor.program import reference
from coda_inductor.program.ops import OPS
from coda_inductor.runtime.op import gemm_epilogue
from coda_inductor.runtime.pool import KernelRequest
from coda_inductor.select.config import legal_configs
from coda_inductor.select.device import arch_of

pytestmark = NEEDS_KERNELS

DTYPES = ("bfloat16", "float16")
N, K = 264, 136  # ragged for every tile


#: How tiles are handed out changes nothing of the epilogues: one kind of each is enough.
DYNAMIC = ("scale", "swiglu_train", "dswiglu", "norm_bwd", "logsumexp")


def representative(kind: str):
    """The legal configs of ``kind`` that are worth the time to compile them."""
    configs = legal_configs(kinds()[kind], arch_of(), TERMS[kind])
    return [config for config in configs if kind in DYNAMIC or not config.dynamic]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    requests = []
    for dtype in DTYPES:
        for program in programs(dtype).values():
            text, config = program.to_json(), str(config_for(program))
            if program.paired:
                requests += [KernelRequest(text, config, variant=v) for v in ("", "swapped")]
            else:
                requests += [KernelRequest(text, config, b_major=b) for b in "kn"]
    requests += [KernelRequest(one_op(op).to_json(), str(config_for(one_op(op)))) for op in OPS]
    for kind, program in kinds().items():
        text = program.to_json()
        for config in representative(kind):
            for variant in reading_of(program, TERMS[kind]).variants:
                requests.append(KernelRequest(text, str(config), "k", B_MAJOR[kind], variant))
    build(requests)


#: Paired weights are K-major: the others have no kernel, and ``unsupported`` says so.
LAYOUTS = [(n, b) for n, p in programs().items() for b in ("k", "n") if b == "k" or not p.paired]


@pytest.mark.parametrize("m", [1, 7, 127, 8191])
@pytest.mark.parametrize(("name", "b_major"), LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_program(dtype, name, b_major, m):
    program = programs(dtype)[name]
    integers = name == "select"  # comparisons of rounded values may differ
    check(program, *inputs(program, m, N, K, b_major=b_major, device="cuda", integers=integers))


@pytest.mark.parametrize("op", list(OPS))
def test_op(op):
    integers = OPS[op].boolean or op == "where"
    program = one_op(op)
    (a,), bs, operands = inputs(program, 250, N, K, device="cuda", integers=integers)
    got = check(program, [a], bs, operands)
    if integers:
        exact = reference.run(program, [a], bs, operands)
        assert torch.equal(got[0], exact[0])


@pytest.mark.parametrize("name", list(kinds()))
def test_every_config(name):
    program = kinds()[name]
    for config in representative(name):
        arguments = inputs(
            program, 1000, 520, 192, b_major=B_MAJOR[name], device="cuda", terms=TERMS[name]
        )
        check(program, *arguments, config)


def test_pair_far_apart():
    program = kinds()["swiglu"]
    (a,), bs, operands = inputs(program, 300, N, K, device="cuda")
    gap = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")  # beyond 32-bit distances
    far = torch.empty_strided(bs[1].shape, bs[1].stride(), dtype=bs[1].dtype, device="cuda")
    far.copy_(bs[1])
    del gap
    check(program, [a], [bs[0], far], operands)


def test_same_weight_twice_falls_back():
    program = kinds()["swiglu"]
    (a,), bs, operands = inputs(program, 64, N, K, device="cuda")
    check(program, [a], [bs[0], bs[0]], operands, call=gemm_epilogue)


def test_layouts_that_must_be_copied():
    program = programs()["rms_partial"]
    (a,), bs, (residual, weight) = inputs(program, 100, N, K, device="cuda")
    strided = torch.randn(100, 2 * K, device="cuda").to(a.dtype)[:, ::2]
    check(program, [strided], bs, [residual, weight])
    check(program, [a.t().contiguous().t()], bs, [residual, weight])
    check(program, [a], [bs[0].expand(K, N).clone()[:, :]], [residual[:1].expand(100, N), weight])
    shifted = torch.randn(N + 1, device="cuda").to(a.dtype)[1:]
    check(program, [a[:1].expand(100, K)], bs, [residual.t().contiguous().t(), shifted])
    odd = torch.randn(100, N + 3, device="cuda").to(a.dtype)[:, 1 : N + 1]
    check(program, [a], bs, [odd, weight[:1].expand(N)])


def test_results_repeat_and_every_element_is_written():
    program = programs()["chain"]
    arguments = inputs(program, 777, N, K, device="cuda")
    poison = [torch.full((4096, 4096), float("nan"), device="cuda") for _ in range(4)]
    del poison  # the allocator hands this memory out again
    first = launched(*arguments, program, config_for(program))
    second = launched(*arguments, program, config_for(program))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
