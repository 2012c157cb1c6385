# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism as in torchtitan: rows go to the ranks that have their experts, and back."""

from __future__ import annotations

import checking
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from zoo.experts import Block, K, fused, given, halves, plain, scattered

from coda_inductor.semantic.experts import WGRAD

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


def exchanged(ids, ranks: int) -> tuple:
    """All arguments of the mixture behind ``w``, which torchtitan exchanges outside of graphs."""
    counts = torch.bincount(ids.reshape(-1), minlength=ranks * EACH)
    dist.all_to_all_single(theirs := torch.empty_like(counts), counts)
    sent, got = (c.view(ranks, EACH).sum(1).tolist() for c in (counts, theirs))
    order = torch.argsort(torch.arange(EACH).repeat(ranks).repeat_interleave(theirs), stable=True)
    offs = theirs.view(ranks, EACH).sum(0).cumsum(0).to(torch.int32)
    return torch.argsort(ids.reshape(-1), stable=True), order, offs, sent, got


def check_experts_of_other_ranks():
    """The exchange stays torch's, and no block of one rank is found; gate and up of the rows that
    came share a tile, and the gradient of the gate is in that of the product behind it."""
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    x, ids, w = given(TOKENS, experts=ranks * EACH)
    harness = checking.check_gradients(Mixture(experts=EACH), x, w, *exchanged(ids, ranks))
    assert not harness.counts["experts"]
    assert fused(harness) == ["pair", "", "", ""]
    assert harness.ops()[str(WGRAD)] == 2
    exchanges = [n for name, n in harness.ops().items() if "all_to_all_single" in name]
    assert sum(exchanges) == 4  # both ways, in both directions
    assert [s.role for s in harness.fused] == ["forward"] * 2 + ["input gradient"] * 2
    assert sum(site.program.loads != () for site in harness.fused) == 1
