# SPDX-License-Identifier: Apache-2.0
"""Masks made of constants become flags of SDPA; repeated heads become grouped ones."""

import math

import pytest
import torch
import torch.nn.functional as F
from checking import check, check_gradients, randn, reasons, side_by_side
from harness import Harness, Stock
from torch.utils.checkpoint import checkpoint

from coda_inductor.dynamo.attention import calls as calls_module
from coda_inductor.dynamo.attention import constants
from coda_inductor.dynamo.attention.calls import classify

T = 12
sdpa = F.scaled_dot_product_attention


def heads(n: int = 4, t: int = T) -> torch.Tensor:
    return randn(2, n, t, 8)


def masked(mask):
    return lambda q, k, v: sdpa(q, k, v, attn_mask=mask(q))


def calls(harness):
    return [n.kwargs for n in harness.raised.nodes if n.target is sdpa]


def arange_mask(q):
    i = torch.arange(q.shape[-2], device=q.device)
    return (i[:, None] >= i)[None, None]


def lowest_mask(q):
    t = q.shape[-2]
    low = torch.full((t, t), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    return low.triu(1)[None, None].expand(2, 1, t, t)


def packed_mask(q):
    """As Hugging Face builds it: one document, found by looking for jumps in the positions."""
    batch, positions = torch.arange(q.shape[0]), torch.arange(q.shape[-2], device=q.device)
    positions = positions.expand(q.shape[0], -1)
    jumps = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    i = torch.arange(q.shape[-2], device=q.device)
    true = i.new_ones((), dtype=torch.bool) & q.new_ones((), dtype=torch.bool)
    b = batch[:, None, None, None]
    same = jumps[b, i[:, None]].__eq__(jumps[b, i])  # as Dynamo of torch 2.11 writes ``==``
    return true & (i[None, None, None, :] <= i[:, None]) & same


def like_mask(q):
    low = torch.full((T, T), float("-inf")).triu(1)
    return low.type_as(q) + low.to(q).expand_as(q @ q.mT)


def in_place_mask(q):
    """As torch's documentation of SDPA writes it."""
    bias = torch.zeros(T, T, dtype=q.dtype)
    return bias.masked_fill_(torch.ones(T, T, dtype=torch.bool).tril_().logical_not(), -math.inf)


CAUSAL = (arange_mask, lowest_mask, packed_mask, like_mask, in_place_mask)


def test_constant_causal_masks_become_a_flag():
    function, tensors = side_by_side(map(masked, CAUSAL), *3 * [(2, 4, T, 8)])
    harness = check_gradients(function, *(t.requires_grad_() for t in tensors))
    assert harness.counts["constant_mask"] == len(CAUSAL)
    assert {(c["attn_mask"], c["is_causal"]) for c in calls(harness)} == {(None, True)}


@pytest.mark.parametrize("full", [True, False])
def test_queries_and_keys_of_different_number(full):
    """A mask that hides nothing is dropped."""

    def attend(q, k, v):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        return sdpa(q, k, v, mask if full else mask.tril(), 0.0, False)

    harness = check(attend, heads(), heads(t=7), heads(t=7))
    assert harness.counts["constant_mask"] == full
    assert not calls(harness)[0]["is_causal"]
    assert ("12 queries but 7 keys" in reasons(harness)) == (not full)


def test_one_evaluation_serves_checkpointed_layers(monkeypatch):
    """They end in attention. A regression: one output was computed once, the others again."""
    seen = []
    monkeypatch.setattr(calls_module, "classify", lambda *a: seen.append(a) or classify(*a))

    def attend(q, k, v):
        mask = arange_mask(q)
        for _ in range(3):
            q = checkpoint(sdpa, q, k, v, mask, use_reentrant=False)
        return q

    inputs = [heads().requires_grad_() for _ in range(3)]
    assert check_gradients(attend, *inputs).counts["constant_mask"] == 3
    assert len(seen) == 1


REFUSED = {
    "depends on L_extra_": lambda _, extra: extra > 0,
    "neither causal nor full": lambda q, _: arange_mask(q).triu(-4),
    "adds numbers other than 0": lambda q, _: torch.linspace(0, 1, T, dtype=q.dtype)[None, :],
    "draws random numbers": lambda q, _: torch.rand(T, T) + torch.eye(T) > 0.5,
    "MiB to evaluate": lambda q, _: arange_mask(q),
    "depends on _remove_batch_dim": lambda *_: torch.func.vmap(lambda i: i >= torch.arange(T))(
        torch.arange(T)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_masks_stay(reason, monkeypatch):
    make = REFUSED[reason]
    if "MiB" in reason:
        monkeypatch.setattr(constants, "MAX_BYTES", 100)

    def attend(q, k, v, extra):
        return sdpa(q, k, v, attn_mask=make(q, extra))

    harness, args = Harness(), [heads(), heads(), heads(), torch.eye(T) + torch.ones(T, T)]
    torch.manual_seed(3)
    ours = harness.run(attend, *args)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, attend(*args))
    assert not harness.counts["constant_mask"]
    assert reason in reasons(harness)


@pytest.mark.parametrize(
    ("shape", "queries"), [((3, 1, T, T), T), ((6, T), 1), ((1, 2, 1, T, T), T)]
)
def test_scores_are_not_broadcast_to_a_mask_that_is_gone(shape, queries):
    """Eager raises; torch.compile makes the larger result."""

    def attend(q, k, v):
        mask = torch.ones(shape, dtype=torch.bool).tril()
        return sdpa(q[:, :, :queries], k, v, attn_mask=mask).shape

    args, harness = [heads()[:1, :1] for _ in range(3)], Harness()
    assert harness.run(attend, *args) == Stock().run(attend, *args)
    assert not harness.counts["constant_mask"]
    assert "scores are broadcast to it" in reasons(harness)


def symbolic(makers, dims=(0, 2), batch=2):
    """Attention under each mask, ``make(query)``, where ``dims`` are symbolic."""

    def attend(q, k, v):
        return [sdpa(q, k, v, attn_mask=make(q)) for make in makers]

    inputs = [randn(batch, 4, T, 8) for _ in range(3)]
    for t in inputs:
        torch._dynamo.mark_dynamic(t, dims)
    return check(attend, *inputs)


@pytest.mark.parametrize(("dims", "batch"), [((0,), 2), ((0, 2), 2), ((2,), 1), ((2,), 64)])
def test_causal_masks_of_symbolic_sizes_become_a_flag(dims, batch):
    harness = symbolic((arange_mask, packed_mask), dims, batch)
    assert harness.counts["constant_mask"] == 2
    assert {(c["attn_mask"], c["is_causal"]) for c in calls(harness)} == {(None, True)}


def positions(q):
    return torch.arange(q.shape[-2])


#: Causal at the sizes that torch saw, and why each stays.
OTHER_SIZES = {
    "a far window": lambda q: arange_mask(q) & (positions(q)[:, None] - 4096 < positions(q)),
    "a near window": lambda q: arange_mask(q) & (positions(q)[:, None] - 20 < positions(q)),
    "counts of counts": lambda q: arange_mask(q) | (arange_mask(q).cumsum(-1).cumsum(-1) > 90),
    "rounding": lambda q: positions(q).half()[:, None] >= positions(q).half(),
    "sums": lambda q: arange_mask(q) | (positions(q) + positions(q)[:, None] > 25),
    "products": lambda q: arange_mask(q) | (positions(q) * positions(q) > 30 * 30),
    "bits": lambda q: arange_mask(q) | (positions(q) & positions(q)[:, None] > 15),
    "a factor": lambda q: arange_mask(q) | (torch.add(positions(q), 5, alpha=-9) > 20 - 45),
    "an end": lambda q: arange_mask(q) | (positions(q).diff(append=positions(q)[:1] + 40) > 35),
    "a size": lambda q: arange_mask(q) | (positions(q) >= 10 * q.shape[0]),
    "the last index": lambda q: arange_mask(q) | (positions(q)[-1] > 12),
    "indices from the end": lambda q: arange_mask(q) | (positions(q)[positions(q) - 5] == 8),
    "a range from a size": lambda q: arange_mask(q) | (torch.arange(q.shape[2], 2, -1)[0] > 12),
    "a batch": lambda q: arange_mask(q) | (positions(q) > 9 + torch.arange(q.shape[0])[:1]),
}


def test_masks_that_may_mean_something_else_at_other_sizes_stay():
    harness = symbolic(tuple(OTHER_SIZES.values()))
    near = [text for text in harness.report.near_misses if "constant_mask" in text]
    seen = [name for name, text in zip(OTHER_SIZES, near, strict=True) if "nor full" in text]
    assert seen == ["a near window", "a batch"]
    assert sum("its size is symbolic" in text for text in near) == len(OTHER_SIZES) - 2


# Spellings of "each key and value head serves n query heads".


def hugging_face(k, n):
    b, h, t, d = k.shape
    return k[:, :, None, :, :].expand(b, h, n, t, d).reshape(b, h * n, t, d)


def interleaved(k, n):
    return k.repeat_interleave(n, dim=1)


def torchtitan(k, n):
    """Repeated before the heads are moved in front of the sequence."""
    k = k.transpose(1, 2).contiguous()
    b, t, h, d = k.shape
    k = torch.unsqueeze(k, dim=3).expand(b, t, h, n, d).reshape(b, t, h * n, d)
    return k.transpose(1, 2)


def repeated(repeat, **how):
    return lambda q, k, v: sdpa(q, repeat(k, 2), repeat(v, 2), **{"is_causal": True, **how})


@pytest.fixture
def groups_here(monkeypatch):
    """Heads are grouped on the CPU, where torch computes them in another way."""
    monkeypatch.setattr(calls_module, "GROUPS_ON", "cpu")


def grouped_inputs():
    return [heads(n).requires_grad_() for n in (4, 2, 2)]


@pytest.mark.parametrize("repeat", [hugging_face, interleaved, torchtitan])
def test_repeated_heads_become_grouped(repeat, groups_here):
    harness = check_gradients(repeated(repeat), *grouped_inputs())
    assert harness.counts["grouped_heads"] == 1
    (call,) = [n for n in harness.raised.nodes if n.target is sdpa]
    assert call.kwargs["enable_gqa"] is True
    assert call.args[1].meta["example_value"].shape[1] == 2


def changed_copy(q, k, v):
    k4, v4 = interleaved(k, 2), interleaved(v, 2)
    v4.clamp_(max=0.5)  # products in place become plain ones
    return sdpa(q, k4, v4)


def changed_view(q, k, v):
    k4, v4 = hugging_face(k, 2), hugging_face(v, 2)
    v.transpose(1, 2)[:, 1:].zero_()
    return sdpa(q, k4, v4)


def changed_after_the_call(q, k, v):
    """What attention saves for its gradient is the copy."""
    y = sdpa(q, interleaved(k, 2), interleaved(v, 2))
    k.zero_()
    return y


def changed_while_expanded(q, k, v):
    k4, v4 = (t.expand(-1, 2, -1, -1) for t in (k[:, :1], v[:, :1]))
    k.mul_(2)
    return sdpa(q[:, :2], k4, v4)


def cut_off(q, k, v):
    """No gradient goes to k and v."""
    with torch.no_grad():
        k4, v4 = interleaved(k, 2), interleaved(v, 2)
    return sdpa(q, k4, v4) + k.sum() + v.sum()


CHANGES = (changed_copy, changed_view, changed_after_the_call, changed_while_expanded, cut_off)


@pytest.mark.parametrize("computed", [True, False])
def test_heads_stay_repeated_where_something_changes_between(computed, groups_here):
    """In what is computed or, without gradients, in inputs."""
    each = [lambda q, k, v, f=f: f(q, k * 1, v * 1) for f in CHANGES] if computed else CHANGES
    function, tensors = side_by_side(each, *((2, n, T, 8) for n in (4, 2, 2)))
    harness = check_gradients(
        function, *(t.requires_grad_(computed or t.shape[1] == 4) for t in tensors)
    )
    assert reasons(harness).count("grouped_heads at") == len(CHANGES)
    assert not harness.counts["grouped_heads"]


STAY = (
    repeated(lambda k, n: k.repeat(1, n, 1, 1)),  # in another order
    repeated(lambda k, n: interleaved(k, n).flip(1)),
    lambda q, k, v: repeated(  # a mask of data
        hugging_face, attn_mask=q.sum() > torch.zeros(T, T), is_causal=False
    )(q, k, v),
    # Two heads of keys, one of values.
    lambda q, k, v: sdpa(q, interleaved(k, 2), interleaved(v[:, :1], 4), is_causal=True),
)


def test_others_stay_repeated(groups_here):
    function, tensors = side_by_side(STAY, *((2, n, T, 8) for n in (4, 2, 2)))
    harness = check_gradients(function, *(t.requires_grad_() for t in tensors))
    assert not harness.counts["grouped_heads"]


def test_inputs_that_share_memory(groups_here):
    def attend(q, k, v, other):
        k4, v4 = interleaved(k, 2), interleaved(v, 2)
        other.zero_()
        return sdpa(q, k4, v4)

    q, k, v = (t.detach() for t in grouped_inputs())
    assert not check_gradients(attend, q, k, v, k[:, :, 1:]).counts["grouped_heads"]
