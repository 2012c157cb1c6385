# SPDX-License-Identifier: Apache-2.0
"""Attention beside a mask of any content becomes FlexAttention, which skips its empty blocks, and
whose kernels find the lists of blocks in what Inductor compiles."""

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import assert_same, check, check_gradients, differentiate, randn, reasons
from harness import Harness
from torch._dynamo.utils import counters
from torch._inductor import config, ir, lowering
from torch._inductor.kernel.flex.common import freeze_irnodes, maybe_realize
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from coda_inductor.dynamo.attention import block_masks
from coda_inductor.dynamo.attention.blocks import block_lists
from coda_inductor.refusal import refuse

T = 300
sdpa = F.scaled_dot_product_attention
higher_order = torch.ops.higher_order
flex, backward_flex = higher_order.flex_attention, higher_order.flex_attention_backward


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Where torch runs it as its plain products, in every dtype and both directions."""
    monkeypatch.setattr(block_masks, "DEVICE", "cpu")
    monkeypatch.setattr(block_masks, "DTYPES", (torch.float64, torch.float32, torch.bfloat16))


def inputs(heads=2, groups=2, t=T, keys=None, batch=2, d=16, dtype=torch.float64):
    q = randn(batch, heads, t, d, dtype=dtype)
    kv = [randn(batch, groups, keys or t, d, dtype=dtype) for _ in range(2)]
    return [x.requires_grad_() for x in (q, *kv)]


def calls(harness, target=flex):
    return [n for n in harness.raised.nodes if n.target is target]


def attend(q, k, v, mask):
    return sdpa(q, k, v, attn_mask=mask)


def layers(q, k, v, mask, n=3):
    for _ in range(n):
        q = sdpa(q, k, v, attn_mask=mask).sin()
    return q


def checkpointed(q, k, v, mask):
    def block(q):
        return sdpa(q, k, v, attn_mask=mask).sin()

    for _ in range(3):
        q = checkpoint(block, q, use_reentrant=False)
    return block(q)


def compare(function, *args, **options):
    return check_gradients(function, *args, gate="always", **options)


def causal(t=T, keys=None):
    return torch.ones(t, keys or t, dtype=torch.bool).tril()


def padded():
    """Two rows of a batch with padding on the left: its queries see nothing."""
    begins = torch.tensor([0, 200])
    return causal() & (torch.arange(T) >= begins[:, None])[:, None, None]


def packed():
    documents = (torch.arange(T)[None] >= torch.tensor([[70], [128], [260]])).sum(0)
    return (causal() & (documents[:, None] == documents))[None, None]


MASKS = {
    "random": lambda: torch.rand(2, 1, T, T) > 0.5,
    "two dimensions": lambda: torch.rand(T, T) > 0.5,
    "expanded over the heads": lambda: (torch.rand(2, 1, T, T) > 0.5).expand(2, 2, T, T),
    "keys only": lambda: torch.rand(2, 1, 1, T) > 0.5,
    "padded": padded,
    "packed": packed,
    "everything": lambda: torch.ones(2, 1, T, T, dtype=torch.bool),
}


def test_any_mask_and_lengths_that_no_block_divides():
    """Rows that see nothing are zero and have no gradient, as in SDPA."""
    given = [(*inputs(), MASKS[name]()) for name in sorted(MASKS.keys() - {"random", "packed"})]
    for t, keys in ((1, 7), (127, 200), (129, 7)):
        given.append((*inputs(t=t, keys=keys), torch.rand(2, 1, t, keys) > 0.3))
    harness = compare(lambda given: [attend(*each) for each in given], given)
    assert harness.counts["block_mask"] == len(given)
    assert not calls(harness, sdpa)


def regrouped(q, k, v, mask):
    b, h, *rest = k.shape
    k, v = (t[:, :, None].expand(b, h, 2, *rest).reshape(b, 2 * h, *rest) for t in (k, v))
    return sdpa(torch.cat([q, q], 1), k, v, attn_mask=mask)


def shared(q, k, v, mask):
    return sdpa(q, k, v, attn_mask=mask[:1].expand_as(mask))


def at_sizes(function, *sizes):
    """A harness that has compiled ``function`` for each (batch, length), which are symbols."""
    harness = Harness(gate="always")
    compiled = torch.compile(function, backend=harness)
    counters.clear()
    for batch, t in sizes:
        given = *inputs(t=t, batch=batch), torch.rand(batch, 1, t, t) > 0.5
        for tensor, dims in zip(given, (*[(0, 2)] * 3, (0, 2, 3)), strict=True):
            torch._dynamo.mark_dynamic(tensor, dims)
        ours, theirs = copy.deepcopy((function, given)), copy.deepcopy((function, given))
        have, want = compiled(*ours[1]), function(*theirs[1])
        assert_same((have, differentiate(have, ours)), (want, differentiate(want, theirs)))
    return harness


@pytest.mark.parametrize("function", [attend, checkpointed, regrouped, shared])
def test_one_graph_for_all_lengths(function):
    """And for all batches: the mask is asked. (One of a single block is compiled again.)"""
    harness = at_sizes(function, (2, T), (3, 200))
    assert harness.graphs == 1
    assert counters["coda"]["block_mask"] == (4 if function is checkpointed else 1)
    assert counters["coda"]["grouped_heads"] == (function is regrouped)
    written = next(n for n in harness.raised.nodes if n.target == "contiguous")
    rows = written.meta["example_value"].shape[0]  # of a batch that has one mask, one is written
    assert rows == 1 if function is shared else isinstance(rows, torch.SymInt)


def test_a_longer_mask_than_kernels_count_is_compiled_again_and_stays(monkeypatch):
    monkeypatch.setattr(block_masks, "INDICES", 2 * 250 * 250)
    harness = at_sizes(attend, (2, 200), (2, T))
    assert (harness.graphs, counters["coda"]["block_mask"]) == (2, 1)
    assert "more than 125000 elements" in reasons(harness)


LISTS = [f"{full}{of}_{what}" for of in ("kv", "q") for full in ("", "full_")
         for what in ("num_blocks", "indices")]  # fmt: skip


@pytest.mark.parametrize(("mask", "t"), [("random", T), ("padded", T), ("packed", 384)])
def test_the_lists_are_those_of_torch(mask, t):
    """``create_block_mask`` of the same mask; contiguous, as kernels read them."""
    whole = torch.zeros(2, t, t, dtype=torch.bool)
    whole[:, :T, :T] = MASKS[mask]()[..., :, :].reshape(-1, *MASKS[mask]().shape[-2:])
    lists = block_lists(whole, True)
    theirs = create_block_mask(lambda b, h, i, j: whole[b, i, j], 2, None, t, t, device="cpu")
    for name, ours in zip(LISTS, lists, strict=True):
        assert torch.equal(ours, getattr(theirs, name)), name
        assert ours.stride() == torch.empty(ours.shape).stride(), name


@pytest.mark.parametrize("how", ["repeated", "enable_gqa", "neither"])
def test_grouped_heads(how):
    def grouped(q, k, v, mask):
        if how == "repeated":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=how == "enable_gqa")

    groups = 4 if how == "neither" else 2
    harness = compare(grouped, *inputs(heads=4, groups=groups), MASKS["random"]())
    (call,) = calls(harness)
    assert call.args[1].meta["example_value"].shape[1] == groups
    assert harness.counts["grouped_heads"] == (how == "repeated")


def test_a_scale_wider_values_and_the_strides_of_sdpas_result():
    """A view after it counts on them."""

    def strided(q, k, v, mask):
        q = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        y = sdpa(q, k, torch.cat([v, v], -1), attn_mask=mask, scale=0.5)
        return y, y.stride()

    assert compare(strided, *inputs(), MASKS["random"]()).counts["block_mask"] == 1


def test_lists_are_handed_to_checkpointed_layers():
    harness = compare(checkpointed, *inputs(), MASKS["random"]())
    assert harness.counts["block_mask"] == 4
    assert sum(n.target == "scatter" for n in harness.raised.nodes) == 4
    assert len(calls(harness)) == 1


def test_calls_that_read_each_other():
    """A regression: the second one still read what the first one had replaced."""

    def chained(q, k, v, mask):
        y = sdpa(q, k, v, attn_mask=mask)
        return sdpa(y, y, sdpa(y, k, v, attn_mask=mask[:1]), attn_mask=mask)

    assert compare(chained, *inputs(), MASKS["random"]()).counts["block_mask"] == 3


# What stays, and why.


def stays(reason, function, *args, **options):
    harness = check_gradients(function, *args, **{"gate": "always", **options})
    assert not harness.counts["block_mask"]
    assert len(calls(harness, sdpa)) >= 1
    assert reason in next(line for line in reasons(harness).splitlines() if "block_mask" in line)


#: What is said -> the arguments.
FORMS = {
    "adds numbers": lambda: [*inputs(), randn(2, 1, T, T).requires_grad_()],
    "each head has its own mask": lambda: [*inputs(), torch.rand(2, 2, T, T) > 0.5],
    "heads have 8 values": lambda: [*inputs(t=20, d=8), torch.rand(20, 20) > 0.5],
    "broadcast to each other": lambda: [inputs()[0], *inputs(batch=1)[1:], MASKS["random"]()],
    "do not all have 4 dimensions": lambda: [
        *(t.detach()[0].requires_grad_() for t in inputs()), torch.rand(T, T) > 0.5
    ],
}  # fmt: skip


#: What is said -> what of the module is otherwise.
NOT_HERE = {
    "make_dual": ("forward_mode", lambda module: refuse("idiom-form", "make_dual is called")),
    "in torch.float64 FlexAttention": ("DTYPES", (torch.bfloat16,)),
    "on cpu FlexAttention has no": ("DEVICE", "cuda"),
    "more than 180000 elements": ("INDICES", 2 * T * T),  # they have no index in 32 bits
}


@pytest.mark.parametrize("reason", [*FORMS, *NOT_HERE])
def test_what_flex_attention_does_not_run_stays(reason, monkeypatch):
    """Of forward mode: Dynamo breaks the graph at SDPA, so that it is said here."""
    if reason in NOT_HERE:
        monkeypatch.setattr(block_masks, *NOT_HERE[reason])
    stays(reason, attend, *FORMS.get(reason, lambda: [*inputs(), MASKS["random"]()])())


def written_in_a_region(q, k, v, mask):
    mask = mask.clone()

    def block(q):
        y = sdpa(q, k, v, attn_mask=mask).sin()
        mask[:, :, :, 1] = False
        return y

    return checkpoint(block, q, use_reentrant=False)


@torch.compiler.nested_compile_region
def region(q, k, v, mask):
    return attend(q, k, v, mask).sin()


INFERENCE = {
    "an in-place op changes it": written_in_a_region,
    "a region that is called several times": (
        lambda q, k, v, mask: region(region(q, k, v, mask), k, v, mask)
    ),
    "broadcast to the mask": lambda *qkv, mask: attend(*(t[:1] for t in qkv), mask),  # eager raises
    "FlexAttention has no dropout": lambda *qkv, mask: sdpa(*qkv, mask, dropout_p=0.5),
}


@pytest.mark.parametrize("reason", INFERENCE)
def test_what_has_no_gradient_in_eager_stays(reason):
    harness, qkv = Harness(gate="always"), [t.detach() for t in inputs()]
    assert len(harness.run(INFERENCE[reason], *qkv, mask=MASKS["random"]())) == 2
    assert reason in reasons(harness)
    assert not harness.counts["block_mask"]


def test_other_symbolic_sizes_stay():
    """Heads of any size; and keys that the mask has, with queries that it has not."""
    stays("block_mask at scaled_dot_product_attention: its size is symbolic", attend, *inputs(),
          MASKS["random"](), dynamic=True)  # fmt: skip
    qkv, mask = inputs(), MASKS["keys only"]()
    torch._dynamo.mark_dynamic(qkv[0], 2)
    stays("it is broadcast to a symbolic size", attend, *qkv, mask)


def test_empty_tensors_stay():
    harness = check(attend, *inputs(t=0, keys=9), torch.rand(2, 1, 0, 9) > 0.5, gate="always")
    assert "a tensor of it is empty" in reasons(harness)


def test_little_work_stays_and_a_lot_over_all_layers_is_taken(monkeypatch):
    mask = MASKS["random"]()
    stays("2 queries and 300 keys", attend, *inputs(t=2, keys=T), mask[:, :, :2], gate="auto")
    stays("gain less than lists cost", attend, *inputs(), mask, gate="auto")
    monkeypatch.setattr(block_masks, "SHORTEST", T)
    monkeypatch.setattr(block_masks, "LEAST", 3 * 2 * 2 * T * T)
    assert check_gradients(layers, *inputs(), mask).counts["block_mask"] == 3
    two = check_gradients(lambda *a: layers(*a, n=2), *inputs(), mask)
    assert not two.counts["block_mask"]


def test_kernels_find_each_mask_of_a_batch(monkeypatch):
    """A kernel takes the lists of batch ``z`` from ``z * stride(1)``, though dimension 1, the
    heads', has the size 1. A regression: it was 0, so that all read the blocks of the first.
    Nothing runs: there are no kernels for the CPU's gradients. Scalar code builds faster."""
    read, aten, batch, t = [], torch.ops.aten, 3, 256

    def note(block_mask):
        parts = maybe_realize(list(block_mask[2:10]))
        freeze_irnodes(parts)
        read.extend((part.get_size(), part.get_stride()) for part in parts)

    def copy(tensor):
        return lowering.lowerings[aten.clone](tensor)

    def forward(query, key, value, score_mod, block_mask, *_):
        note(block_mask)
        rows = lowering.lowerings[aten.select](query, 3, 0)
        return copy(query), copy(rows), copy(rows)

    def backward(query, key, value, *rest):  # out, lse, their gradients, two graphs, block mask
        note(rest[6])
        return copy(query), copy(key), copy(value), ()

    monkeypatch.setitem(lowering.lowerings, flex, forward)
    monkeypatch.setitem(lowering.lowerings, backward_flex, backward)
    seen = causal(t) & (torch.rand(batch, 1, 1, t) > 0.5)
    tensors = inputs(t=t, batch=batch, dtype=torch.float32)
    options = {"gate": "always", "strict": True}
    with config.patch({"cpp.simdlen": 0, "force_disable_caches": True}):
        compiled = torch.compile(sdpa, backend="coda", options=options)
        compiled(*tensors, attn_mask=seen).sum().backward()
    assert counters["coda"]["block_mask"] == 1
    assert len(read) == 16
    for sizes, strides in read:
        assert sizes[:2] == [batch, 1]
        assert tuple(map(int, strides)) == torch.empty([*map(int, sizes)]).stride()


def test_kernels_read_the_mask_and_do_not_compute_it(monkeypatch):
    """A regression: Inductor computed ``cat`` inside the kernel, which raised an error."""
    aten, masks = torch.ops.aten, []

    def forward(query, *rest):
        masks.extend(rest[-1])
        query, rows = (lowering.lowerings[aten.clone](t)
                       for t in (query, lowering.lowerings[aten.select](query, 3, 0)))  # fmt: skip
        return query, rows, rows

    def attended(q, k, v, text):
        padded = torch.cat([text, text.new_ones(2, 216)], 1)[:, None, None]
        return sdpa(q, k, v, attn_mask=padded)

    monkeypatch.setitem(lowering.lowerings, flex, forward)
    compiled = torch.compile(attended, backend="coda", options={"gate": "always", "strict": True})
    with torch.no_grad(), config.patch(force_pointwise_cat=True):  # as on a GPU
        compiled(*inputs(t=256, dtype=torch.float32), torch.ones(2, 40, dtype=torch.bool))
    (mask,) = masks
    while not isinstance(mask, (ir.Buffer, ir.Loops)):
        mask = mask.data
    assert isinstance(mask, ir.Buffer)


def test_lists_that_torchtitan_makes_with_vmap():
    """Values of vmap have no storage. With ``strict``: no pass may fail."""
    position = torch.arange(64) % 20

    def mask(b, h, q, k):
        return (q >= k) & (position[q] - position[k] == q - k)

    found = Harness(gate="always").run(create_block_mask, mask, 2, None, 64, 64, device="cpu")
    assert found.shape == (2, 1, 64, 64)
