# SPDX-License-Identifier: Apache-2.0
"""Rows that a loop scores one by one, as ``selective_log_softmax`` and ``entropy_from_logits`` do,
are scored together."""

import torch
import torch.nn.functional as F
from checking import TOLERANCE, check, check_gradients, raised
from zoo.heads import B, Head, Several, T, V, inputs

from coda_inductor.graph.read import op_name
from coda_inductor.semantic.loss import cross_entropy, entropy


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


def one_chunk(z, y):
    return chunks(z, y, B * T)


def test_a_loop_is_one_op():
    each = (selected, narrow, unbound, chunks, one_chunk, verl)
    harness = check_gradients(Several(map(Head, each)), *inputs())
    assert (raised(harness, cross_entropy), raised(harness, entropy)) == (3, 3)
    assert not joins(harness)


def test_in_16_bits():
    dtype = torch.bfloat16
    harness = check_gradients(Head(narrow, dtype), *inputs(dtype), tolerance=TOLERANCE[dtype])
    assert raised(harness, cross_entropy) == 1


def joins(harness):
    return [n for n in harness.raised.nodes if op_name(n) in ("stack", "cat")]


def changed(z, _):
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


OTHERS = {
    "into": into,
    "backwards": lambda z, _: torch.stack([z[1].logsumexp(-1), z[0].logsumexp(-1)]),
    "one twice": lambda z, _: torch.stack([z[0].logsumexp(-1), z[0].logsumexp(-1)]),
    "of more": lambda z, _: torch.stack([z.repeat(2, 1, 1)[i].logsumexp(-1) for i in range(2)]),
    "along the rows": lambda z, _: torch.stack([rows.logsumexp(0) for rows in z]),
    "along sequences": lambda z, _: torch.cat([c.logsumexp(-2) for c in z.flatten(0, 1).split(4)]),
    "behind": lambda z, _: torch.stack([rows.logsumexp(-1) for rows in z], -1),
    "of columns": lambda z, _: torch.cat([c.logsumexp(-1) for c in z.split(V // 2, -1)]),
    "unlike": lambda z, _: torch.stack([z[0].logsumexp(-1), z[1].exp().sum(-1)]),
    "unlike numbers": lambda z, _: torch.stack([(z[i] * (i + 1)).logsumexp(-1) for i in range(B)]),
    "other ranks": lambda z, y: torch.stack([(z[i] * y[i, 0]).logsumexp(-1) for i in range(B)]),
    "masks": lambda z, _: torch.stack([z[False].sum(-1), z[True].sum(-1)][1:] * 2),
    "changed": changed,
    "read elsewhere": read_elsewhere,
}


def test_other_loops_stay():
    model = Head(lambda z, y: [other(z, y) for other in OTHERS.values()])
    harness = check(model, *inputs(), tolerance=1e-6)
    assert len(joins(harness)) == len(OTHERS)
