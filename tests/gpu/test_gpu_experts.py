# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on a GPU: grouped kernels, what surrounds them, whole blocks."""

import itertools

import pytest
import torch
from oracle import ARCH, NEEDS_KERNELS, check, hold
from programs import grouped
from test_gpu_exact import counted, product
from zoo.experts import Block, given

from coda_inductor.mainloop import experts as kernels
from coda_inductor.select.config import legal_configs
from coda_inductor.semantic import experts as semantic

pytestmark = NEEDS_KERNELS

BF16 = torch.bfloat16
#: Rows of each expert: ragged, none at all, all of one, and fewer than a tile.
ROWS = ([130, 0, 1, 257, 0], [0, 0, 700], [1], [0, 3, 4], [*range(60)])


def routed(rows, tokens: int = 97):
    """(offsets of groups, an index of rows of ``tokens``)."""
    edges = torch.tensor([0, *rows]).cumsum(0).to(torch.int32).cuda()
    index = torch.randint(tokens, (sum(rows),), dtype=torch.int32, device="cuda")
    return edges, index


def tensors(name: str, rows, n=264, k=192, tokens=97, turned=False):
    program = grouped()[name]
    groups, index = routed(rows, tokens)
    gathered, m, e = program.routes[1] is not None, sum(rows), len(rows)
    terms = 2 if name == "experts_join" else 1

    def made(*shape):
        return torch.randn(shape, device="cuda", dtype=BF16)

    as_ = [made(tokens if gathered else m, k) for _ in range(terms)]
    weight = made(e, terms * k, n) if name in ("experts_dgrad", "experts_join") else (
        made(e, len(program.accs) * n, k).mT
    )  # fmt: skip
    whole = [weight.contiguous() if turned else weight]
    parts = weight.chunk(terms, 1) if terms > 1 else weight.chunk(len(program.accs), 2)
    bs = whole if program.alternating else parts
    lanes = len(program.accs)
    by_kind = {
        "groups": lambda: groups,
        "index": lambda: index,
        "tile": lambda: made(m, n),
        "row": lambda: made(e, n).repeat_interleave(lanes, 1),
        "col": lambda: torch.rand(m, device="cuda") + 0.5,
    }
    operands = [by_kind[o.kind]() for o in program.operands]
    return program, as_, list(bs), operands


@pytest.mark.parametrize("rows", ROWS, ids=len)
@pytest.mark.parametrize("name", grouped())
def test_ragged_rows(name, rows):
    """A weight may be contiguous along its columns, as gpt-oss's is."""
    for turned in {False, name == "experts_alternating"}:
        check(*tensors(name, rows, turned=turned))


@pytest.mark.parametrize("name", grouped())
def test_every_config(name):
    for config in legal_configs(grouped()[name], ARCH, 2 if name == "experts_join" else 1):
        check(*tensors(name, ROWS[0]), config)


def test_halves_in_either_order_and_of_two_allocations():
    program, as_, bs, operands = tensors("experts_up", ROWS[0])
    check(program, as_, bs[::-1], operands)
    check(program, as_, [b.mT.contiguous().mT for b in bs], operands)
    program, as_, bs, operands = tensors("experts_join", ROWS[0])
    for left in (1, -1):
        check(program, as_[::left], bs, operands)


@pytest.mark.parametrize("experts", [3, 256, 2000])
@pytest.mark.parametrize("pairs", [0, 1, 4099, 65536])
def test_routing(pairs, experts):
    """More experts than a counting sort takes leave it to the op."""
    route = kernels.route if experts <= 256 else torch.ops.coda_inductor.route
    ids = torch.randint(experts + 2, (pairs,), device="cuda") - 1  # two are none
    for each in (ids, torch.full_like(ids, experts - 1)):
        found = zip(route(each, experts, 2), semantic.route(each, experts, 2), strict=True)
        assert all(torch.equal(have, want) for have, want in found)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("tokens", "top_k", "d"), [(0, 2, 64), (1, 1, 100), (301, 8, 2048), (33, 3, 4104)]
)
def test_combine(tokens, top_k, d, weighted):
    ids = torch.randint(9, (tokens * top_k,), device="cuda")  # the last one is none
    _, _, inverse, offsets = semantic.route(ids, 8, top_k)
    y = torch.randn(tokens * top_k, d, device="cuda", dtype=BF16)
    w = torch.rand(tokens, top_k, device="cuda").to(BF16) if weighted else None
    exact = semantic.combine(y.float(), w if w is None else w.float(), inverse, offsets, top_k)
    have, plain = (f(y, w, inverse, offsets, top_k) for f in (kernels.combine, semantic.combine))
    hold(have, plain, exact)
    assert torch.equal(have, kernels.combine(y, w, inverse, offsets, top_k))


@pytest.mark.parametrize("rows", ROWS, ids=len)
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_weights(rows, turned):
    """The kernel itself, which the op may fall back from. An expert without rows has zeros."""
    offsets, index = routed(rows)
    a = torch.randn(97, 192, device="cuda", dtype=BF16)
    bs = [torch.randn(sum(rows), n, device="cuda", dtype=BF16) for n in (264, 256)]
    have = kernels.grouped_wgrad(a, index, bs, offsets, turned)
    b, edges = torch.cat(bs, 1), offsets.tolist()
    for e, (start, end) in enumerate(itertools.pairwise(edges)):
        left, right = a[index[start:end]].t(), b[start:end]
        hold(have[e], left @ right, left.float() @ right.float(), e)


def test_every_run_gives_the_same_bits():
    """Of the result and all gradients, under deterministic algorithms."""
    block = Block(mm=product, count=counted, dtype=BF16).cuda()
    x, ids, w = (t.detach().cuda() for t in given(500, dtype=BF16))
    mine = torch.compile(block, backend="coda", options={"gate": "always", "strict": True})

    def trained():
        leaves = [t.detach().requires_grad_() for t in (x, w)]
        y = mine(leaves[0], ids, leaves[1])
        return [
            y.detach(),
            *torch.autograd.grad(y.float().square().sum(), [*leaves, block.w13, block.w2]),
        ]

    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(trained(), trained(), rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_cuda_graphs():
    block = Block(mm=product, count=counted, dtype=BF16).cuda()
    x, ids, w = (t.detach().cuda() for t in given(500, dtype=BF16))
    options = {"gate": "always", "strict": True, "triton.cudagraphs": True}
    mine = torch.compile(block, backend="coda", options=options)
    with torch.no_grad():
        want = block(x, ids, w)
        for _ in range(4):
            torch.testing.assert_close(mine(x, ids, w), want, rtol=3e-2, atol=3e-2)
