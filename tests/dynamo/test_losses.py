# SPDX-License-Identifier: Apache-2.0
"""Losses of all positions but the last, of logits with their classes in the second dimension, and
log-probabilities that are gathered by hand are losses of the rows that the LM head makes. Rows that
a loop scores one by one, as ``selective_log_softmax`` does, are scored together."""

import pytest
import torch
import torch.nn.functional as F
from checking import TOLERANCE, check, check_gradients, raised, randn, slice_logits
from torch import nn
from zoo.heads import B, Head, Several, T, V, inputs

from coda_inductor.graph.read import op_name
from coda_inductor.semantic.define import DEFINITIONS
from coda_inductor.semantic.loss import cross_entropy, entropy


def hugging_face(z, t):
    rows, labels = z[..., :-1, :].contiguous(), t[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(rows.view(-1, V), labels.view(-1))


def summed(z, t):
    rows = z[:, 0:-1, :].reshape(-1, z.size(-1))
    loss = F.cross_entropy(rows, t[:, 1:].reshape(-1), reduction="sum", label_smoothing=0.1)
    return loss / (B * (T - 1))


def transposed(z, t):
    return F.cross_entropy(z.transpose(1, 2), t, ignore_index=3)


def gathered(z, t):
    return F.log_softmax(z, dim=-1).gather(dim=-1, index=t.unsqueeze(-1)).squeeze(-1)


def rows_of(z, t, *more, **how):
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), t.reshape(-1), *more, **how)


LOSSES = {
    **{f.__name__: f for f in (hugging_face, summed, transposed, gathered)},
    "grpo": lambda z, y: (z[:, :-1].log_softmax(-1).gather(-1, y[:, 1:, None]).squeeze(-1)
                          * (y[:, 1:] != 3)).sum(),
    "permuted": lambda z, y: (F.cross_entropy(z.permute(0, 2, 1), y, reduction="none")
                              * (y != 3)).mean(),
    "weighed": lambda z, y: (rows_of(z[:, :-1], y[:, 1:], reduction="none")
                             * torch.arange(B * (T - 1))).sum(),
    "difference": lambda z, y: (torch.gather(z, -1, y[..., None]).squeeze(-1)
                                - torch.logsumexp(z, dim=-1)),
    "columns": lambda z, y: (z.gather(-1, y[..., None]) - z.logsumexp(-1, keepdim=True)).sum(),
    "opposite": lambda z, y: (z.logsumexp(-1) - z.gather(-1, y[..., None])[..., 0]).sum(),
    "all of them": lambda z, y: (z - z.logsumexp(-1, True)).gather(-1, y[..., None])[:, :, 0],
}  # fmt: skip


def test_the_heads_rows_are_read_as_they_are(monkeypatch):
    slice_logits(monkeypatch, B * T * 2 * 128)
    harness = check_gradients(Several(map(Head, LOSSES.values())), *inputs())
    number = len(LOSSES)
    assert raised(harness, cross_entropy) == number
    assert harness.counts["cross_entropy"] == harness.counts["cross_entropy_backward"] == number
    kept = [n.meta["val"] for n in harness.saved if isinstance(n.meta.get("val"), torch.Tensor)]
    # The logits of each.
    assert sum(t.numel() in (B * T * V, B * (T - 1) * V) for t in kept) == number


def selected(z, y):
    """Of float32, as in TRL and verl: log-sum-exps of one sequence at a time."""
    picked = torch.gather(z, dim=-1, index=y.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(rows, dim=-1) for rows in z])


def narrow(z, y):
    pairs = zip(z, y.unsqueeze(-1), strict=True)
    each = [F.log_softmax(rows, dim=-1).gather(dim=-1, index=index) for rows, index in pairs]
    return torch.stack(each).squeeze(-1)


def unbound(z, y):
    each = [rows.logsumexp(-1, keepdim=True) for rows in z.unbind()]
    return z.gather(-1, y[..., None]) - torch.stack(each, 0)


def chunks(z, y, size=5):
    """As in TRL before 1.16. The last chunk is shorter."""
    each = []
    for rows in z.reshape(-1, V).split(size, dim=0):
        logs = F.log_softmax(rows, dim=-1)
        each.append(-(torch.exp(logs) * logs).sum(-1))
    return torch.cat(each, 0).reshape(y.shape)


def verl(z, y):
    each = []
    for rows in z.reshape(-1, V).chunk(3):
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        chances = F.softmax(wide, dim=-1)
        each.append(torch.logsumexp(wide, dim=-1) - torch.sum(chances * wide, dim=-1))
    return torch.cat(each, dim=0).view_as(y)


def joins(harness):
    return [n for n in harness.raised.nodes if op_name(n) in ("stack", "cat")]


def test_a_loop_is_one_op():
    one_chunk = lambda z, y: chunks(z, y, B * T)  # noqa: E731
    each = (selected, narrow, unbound, chunks, one_chunk, verl)
    harness = check_gradients(Several(map(Head, each)), *inputs())
    assert (raised(harness, cross_entropy), raised(harness, entropy)) == (3, 3)
    assert not joins(harness)


WIDENED = [
    narrow,
    lambda z, y: rows_of(z[:, :-1].float(), y[:, 1:]),
    lambda z, y: F.log_softmax(z, -1, dtype=torch.float32).gather(-1, y[..., None]),
    transposed,
]


def test_in_16_bits():
    dtype = torch.bfloat16
    model, how = Several(Head(loss, dtype) for loss in WIDENED), {"tolerance": TOLERANCE[dtype]}
    assert raised(check_gradients(model, *inputs(dtype), **how), cross_entropy) == len(WIDENED)


def test_the_dtype_under_autocast():
    """A CPU's autocast makes cross entropies float32, and not log-softmaxes."""
    x, labels = inputs(torch.float32)
    names = ("gathered", "difference", "opposite", "all of them")
    model = Several(Head(LOSSES[name], torch.float32) for name in names)
    with torch.autocast("cpu", torch.bfloat16):
        harness = check(model, x.detach(), labels, tolerance=0.05)
    assert raised(harness, cross_entropy) == len(names)


def test_dynamic_sizes():
    """One more row a sequence would ask how long it is; the head reads one less."""
    x, labels = inputs()
    torch._dynamo.mark_dynamic(labels, 1)
    torch._dynamo.mark_dynamic(x, 1)
    assert check_gradients(Head(hugging_face), x, labels).counts["cross_entropy"] == 1


def test_no_sequences_and_logits_that_are_returned_too():
    model = Head(lambda z, y: (hugging_face(z, y), transposed(z, y), z))
    x, labels = inputs()
    for rows in (B, 0):
        given = x.detach()[:rows].requires_grad_(), labels[:rows]
        assert raised(check_gradients(model, *given), cross_entropy) == 2


def changed_between(z, t):
    z = z.detach().clone()
    rows, chances = z[:, :-1].reshape(-1, V), z.log_softmax(-1)
    z.zero_()
    return F.cross_entropy(rows, t[:, 1:].reshape(-1)), chances.gather(-1, t[..., None])


def changed_before_the_difference(z, t):
    z = z.detach().clone()
    sums = z.logsumexp(-1, keepdim=True)
    z.mul_(2)
    return (z - sums).gather(-1, t[..., None])


OTHERS = {
    "changed before the difference": changed_before_the_difference,
    "without the first": lambda z, t: rows_of(z[:, 1:], t[:, 1:]),
    "without the last class": lambda z, t: rows_of(z[..., :-1], t % (V - 1)),
    "weights": lambda z, t: rows_of(z[:, :-1], t[:, 1:], torch.linspace(0, 1, V, dtype=z.dtype)),
    "rounded": lambda z, t: rows_of(z[:, :-1].float().double(), t[:, 1:]),
    "other turn": lambda z, t: F.cross_entropy(z.permute(1, 2, 0), t.t()),
    "changed between": changed_between,
    "read elsewhere": lambda z, t: (
        rows_of(rows := z[:, :-1].reshape(-1, V), t[:, 1:]) + rows.square().mean()
    ),
    "entropy": lambda z, t: (
        (p := z.log_softmax(-1)).gather(-1, t[..., None]),
        (p.exp() * p).sum(-1),
    ),
    "probabilities": lambda z, y: F.cross_entropy(z.mT, (2 * z.detach()).softmax(-1).mT),
    "other dimension": lambda z, y: z.log_softmax(1).gather(-1, y[..., None]),
    "several": lambda z, y: z.log_softmax(-1).gather(-1, torch.stack((y, y + 1), -1) % V),
    "some rows": lambda z, y: z.log_softmax(-1).gather(-1, y[:, 1:, None]),
    "of other logits": lambda z, y: (z - z.tanh().logsumexp(-1, True)).gather(-1, y[..., None]),
    "of two": lambda z, y: z.gather(-1, y[..., None].expand(B, T, 2))[..., 1] - z.logsumexp(-1),
    "of all": lambda z, y: (z - z.logsumexp(-1, True)).square().mean(-1) * y,
    "across": lambda z, y: z.log_softmax(-1).gather(1, y[..., None] % T),
    "narrowed": lambda z, y: F.log_softmax(z, -1, dtype=torch.float32).gather(-1, y[..., None]),
}


def test_others_stay():
    """All of one graph's logits."""
    model = Head(lambda z, y: [other(z, y) for other in OTHERS.values()])
    harness = check(model, *inputs(), tolerance=1e-6)
    roots = [n.args[0] for n in harness.raised.nodes if n.target is cross_entropy]
    assert not any(z.meta["example_value"].numel() == B * T * V for z in roots)


def test_no_index_is_ignored():
    """One below zero is an error, as it was."""
    harness = check_gradients(Head(gathered), *inputs())
    (loss,) = (n for n in harness.raised.nodes if n.target is cross_entropy)
    assert loss.args[2] == -(2**31)
    definition = DEFINITIONS[cross_entropy].function
    with pytest.raises((RuntimeError, IndexError)):
        definition(randn(2, V), torch.tensor([1, -100]), *loss.args[2:])


def changed_in_the_loop(z, _):
    z = z.clone()
    first = z[0].logsumexp(-1)
    z.mul_(2)
    return torch.stack([first, z[1].logsumexp(-1)])


def read_elsewhere(z, _):
    each = [rows.logsumexp(-1) for rows in z]
    return torch.stack(each) + each[0].square()


def into(z, _):
    out = z.new_empty(B, T)
    torch.stack([rows.logsumexp(-1) for rows in z.detach()], out=out)
    return out * 2


OTHER_LOOPS = {
    "into": into,
    "backwards": lambda z, _: torch.stack([z[1].logsumexp(-1), z[0].logsumexp(-1)]),
    "of more": lambda z, _: torch.stack([z.repeat(2, 1, 1)[i].logsumexp(-1) for i in range(2)]),
    "along the rows": lambda z, _: torch.stack([rows.logsumexp(0) for rows in z]),
    "along sequences": lambda z, _: torch.cat([c.logsumexp(-2) for c in z.flatten(0, 1).split(4)]),
    "of columns": lambda z, _: torch.cat([c.logsumexp(-1) for c in z.split(V // 2, -1)]),
    "unlike numbers": lambda z, _: torch.stack([(z[i] * (i + 1)).logsumexp(-1) for i in range(B)]),
    "other ranks": lambda z, y: torch.stack([(z[i] * y[i, 0]).logsumexp(-1) for i in range(B)]),
    "masks": lambda z, _: torch.stack([z[False].sum(-1), z[True].sum(-1)][1:] * 2),
    "changed": changed_in_the_loop,
    "read elsewhere": read_elsewhere,
}


def test_other_loops_stay():
    model = Head(lambda z, y: [other(z, y) for other in OTHER_LOOPS.values()])
    harness = check(model, *inputs(), tolerance=1e-6)
    assert len(joins(harness)) == len(OTHER_LOOPS)
