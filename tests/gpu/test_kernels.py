# SPDX-License-Identifier: Apache-2.0
"""Generated kernels on a GPU against the reference executor. A test builds what it launches, and
few kernels are launched by two tests: processes share the work."""

import pytest
import torch
from oracle import ARCH, NEEDS_KERNELS, check, launched
from programs import B_MAJOR, TERMS, heads, inputs, kinds, legal, one_op, programs

from coda_inductor.memory.halves import half_of
from coda_inductor.program import reference
from coda_inductor.program.ops import OPS
from coda_inductor.select.config import Config, legal_configs

pytestmark = NEEDS_KERNELS

N, K = 264, 136  # ragged for every tile


def representative() -> list[tuple[str, str]]:
    """Each config with the first kind of site that may have it, and each kind in each schedule."""
    seen, found = set(), []
    for kind, program in kinds().items():
        for config in legal_configs(program, ARCH, TERMS[kind]):
            schedule = (config.pingpong, config.lean, config.dynamic)
            ways = {str(config), (kind, *schedule)}
            if not ways <= seen:
                found.append((kind, str(config)))
            seen |= ways
    return found


#: Paired weights are K-major: the others have no kernel, and ``unsupported`` says so.
LAYOUTS = [(n, b) for n, p in programs().items() for b in ("k", "n") if b == "k" or not p.paired]
#: What differs in float16 is how a number is read, stored and rounded for a sum.
PROGRAMS = [*(("bfloat16", *each) for each in LAYOUTS), *(
    ("float16", name, "k") for name in ("rms_partial", "chain", "paired_sums")
)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "name", "b_major"), PROGRAMS)
def test_program(dtype, name, b_major):
    program = programs(dtype)[name]
    integers = name == "select"  # comparisons of rounded values may differ
    for m in (1, 127, 8191):
        check(program, *inputs(program, m, N, K, b_major=b_major, device="cuda", integers=integers))


@pytest.mark.parametrize("name", ["gated", "paired_batches"])
@pytest.mark.parametrize(("batch", "part"), [(2, 256), (3, 257)])
def test_rows_of_a_batch(name, batch, part):
    """Where tiles lie in two parts, and where they do not."""
    program = programs()[name]
    check(program, *inputs(program, batch * part, N, K, device="cuda", batch=batch))


@pytest.mark.parametrize("op", list(OPS))
def test_op(op):
    integers = OPS[op].boolean or op == "where"
    program = one_op(op)
    (a,), bs, operands = inputs(program, 250, N, K, device="cuda", integers=integers)
    got = check(program, [a], bs, operands)
    if integers:
        exact = reference.run(program, [a], bs, operands)
        assert torch.equal(got[0], exact[0])


@pytest.mark.parametrize(("kind", "config"), representative())
def test_config(kind, config):
    program, how = kinds()[kind], {"b_major": B_MAJOR[kind], "terms": TERMS[kind]}
    arguments = inputs(program, 1000, 520, 192, device="cuda", **how)
    check(program, *arguments, Config.parse(config))


def test_pair_far_apart_in_either_order():
    program = kinds()["swiglu"]
    (a,), bs, operands = inputs(program, 300, N, K, device="cuda")
    gap = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")  # beyond 32-bit distances
    far = torch.empty_strided(bs[1].shape, bs[1].stride(), dtype=bs[1].dtype, device="cuda")
    far.copy_(bs[1])
    del gap
    for pair in ([bs[0], far], [far, bs[0]]):
        check(program, [a], pair, operands)


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


@pytest.mark.parametrize("name", [name for name, p in heads().items() if legal_configs(p, ARCH)])
def test_heads(name):
    program = heads()[name]
    for m, count in ((1, 3), (127, 1), (1021, 10)):
        check(program, *inputs(program, m, count * program.head, K, device="cuda"))
    arguments = inputs(program, 1000, 11 * program.head, 200, device="cuda")
    for config in legal_configs(program, ARCH)[1::4]:
        check(program, *arguments, config)


PAIR = legal(kinds()["swiglu_train"])


@pytest.mark.parametrize("config", legal_configs(PAIR, ARCH)[:6], ids=str)
def test_half_of_a_pair_has_its_bits(config):
    """What is computed again without the other half, in the config of the pair. Sums over K of
    another order would differ in some of 2 million elements."""
    as_, bs, operands = inputs(PAIR, 1000, 2048, 4096, device="cuda")
    pair = launched(as_, bs, operands, PAIR, config)
    for at, store in enumerate(PAIR.stores):
        found = half_of(PAIR, at)
        assert (found is None) == (store.value not in ("g", "u"))
        if found is not None:
            half, product, own = found
            assert config in legal_configs(half, ARCH)
            alone = launched(as_, [bs[product]], [operands[i] for i in own], half, config)
            assert torch.equal(alone[0], pair[at])
