# SPDX-License-Identifier: Apache-2.0
"""Experts that are spread over ranks, and experts whose weights are sharded."""

import checking
import torch
import torch.distributed as dist
import training as on
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from zoo.experts import Block, K, fused, given, halves, plain, scattered
from zoo.layers import Gated

EACH, TOKENS = 3, 12  # experts and tokens of each rank


class Mixture(Block):
    def forward(self, x, w, perm, order, offs, sent, got):
        """``order`` (R,) sorts rows that came by expert, ``offs`` (EACH,) are the ends of theirs;
        ``sent`` and ``got``: how many rows go to each rank, and come from it."""
        rows = all_to_all_single_autograd(x[perm // K], got, sent, dist.group.WORLD)
        a = halves(rows[order], offs, plain, self.w13)
        y = plain(a, self.w2.mT, offs)[torch.argsort(order)]
        back = all_to_all_single_autograd(y, sent, got, dist.group.WORLD)
        return scattered(back, w, perm, x, K)


def experts_of_other_ranks():
    """As in torchtitan, which exchanges counts outside of graphs. The exchange of rows stays
    torch's; gate and up of the rows that came share a tile."""
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    x, ids, w = given(TOKENS, experts=ranks * EACH)
    counts = torch.bincount(ids.reshape(-1), minlength=ranks * EACH)
    dist.all_to_all_single(theirs := torch.empty_like(counts), counts)
    sent, got = (c.view(ranks, EACH).sum(1).tolist() for c in (counts, theirs))
    order = torch.argsort(torch.arange(EACH).repeat(ranks).repeat_interleave(theirs), stable=True)
    offs = theirs.view(ranks, EACH).sum(0).cumsum(0).to(torch.int32)
    perm = torch.argsort(ids.reshape(-1), stable=True)
    harness = checking.check_gradients(Mixture(experts=EACH), x, w, perm, order, offs, sent, got)
    assert fused(harness) == ["pair", "", "", ""]
    exchanges = [n for name, n in harness.ops().items() if "all_to_all_single" in name]
    assert sum(exchanges) == 4  # both ways, in both directions


class Switched(nn.Module):
    """Experts that are sharded alone, of which a call uses those that it names."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Gated(16, 32, front=True) for _ in range(4))

    def forward(self, x, used):
        return sum(self.experts[i](x) for i in used)


def an_expert_that_only_the_last_micro_batch_uses():
    """pytorch/pytorch 196996: gradients are reduced in float32 after the last of four passes, and
    those of one expert exist since then."""
    policy, data = MixedPrecisionPolicy(torch.bfloat16, torch.float32), torch.randn(4, 8, 16)
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        on.fresh()
        model = Switched()
        for expert in model.experts:
            if ours:
                expert.compile(**on.HOW)
            fully_shard(expert, mesh=on.mesh(), mp_policy=policy)
        fully_shard(model, mesh=on.mesh(), mp_policy=policy)
        model(data[0], range(4)).sum().backward()  # torch shards no gradient of an unused one
        model.zero_grad()
        for i, x in enumerate(data):
            model.set_requires_gradient_sync(i == 3)
            model(x, range(4) if i == 3 else range(3)).float().square().mean().backward()
        found.append([on.full(p.grad) for p in model.parameters()])
    on.assert_fired({"swiglu_backward": 1})
    for eager, compiled in zip(*found, strict=True):
        assert (eager - compiled).norm() <= 2e-2 * eager.norm()


CHECKS = {check.__name__: check for check in (
    experts_of_other_ranks, an_expert_that_only_the_last_micro_batch_uses,
)}  # fmt: skip
