# SPDX-License-Identifier: Apache-2.0
"""A rank that compiles slowly keeps no other from compiling: the slow one is not done before the
others say that they are. Nothing is timed, so that it does not matter how slow the machine is."""

from __future__ import annotations

import datetime as dt
import itertools

import checks_ddp
import checks_fsdp
import checks_tensor
import pytest
import torch
import torch.distributed as dist
from decoder import OPTIONS, batches, decoder, fresh, full, loss_of, mine
from torch.distributed.distributed_c10d import _get_default_store

from coda_inductor import backend, joint

#: How long the slow rank waits for the others, which have nothing else to do.
SECONDS = 60
_turns = itertools.count()


class Slow:
    """Compilations of which that of rank ``slow`` goes on, amid our passes, when each other rank is
    done with its first.

    Attributes:
        waited: on the slow rank whether the others were done in time; elsewhere empty.
    """

    def __init__(self, slow: int, patch: pytest.MonkeyPatch):
        self.store = dist.PrefixStore(f"slow rank {next(_turns)}", _get_default_store())
        self.slow, self.waited = dist.get_rank() == slow, list[bool]()
        self.others = [str(rank) for rank in range(dist.get_world_size()) if rank != slow]
        then = joint.on_aten
        patch.setattr(joint, "on_aten", lambda *given: (self.wait(), then(*given))[1])

    def wait(self) -> None:
        if self.slow and not self.waited:
            try:
                self.store.wait(self.others, dt.timedelta(seconds=SECONDS))
            except dist.DistStoreError:
                self.waited.append(False)
            else:
                self.waited.append(True)

    def __call__(self, gm, inputs):
        """What torch.compile takes as its backend."""
        compiled = backend.coda(gm, inputs, options=OPTIONS)
        self.store.set(str(dist.get_rank()), "done")
        return compiled


def in_blocks(how):
    model = decoder(1)
    for block in model.layers:
        block.compile(backend=how)
    return model


def replicated(how):
    return checks_ddp.buckets(in_blocks(how))


def sharded(how):
    return checks_fsdp.shard(in_blocks(how), reshard=True)


def in_parts(how):
    model = checks_tensor.tensor_parallel(decoder(1), checks_tensor.mesh())
    model.compile(backend=how)
    return model


def check_a_slow_rank_keeps_no_other_from_compiling():
    for slow, way in enumerate((replicated, sharded, in_parts)):
        fresh()
        tokens = batches(2)[0]
        tokens = tokens if way is in_parts else mine(tokens)
        with (
            pytest.MonkeyPatch.context() as patch,
            torch._dynamo.config.patch(optimize_ddp=False),
        ):
            how = Slow(slow % 2, patch)
            loss_of(full(way(how)(tokens)), tokens).backward()
        assert how.waited == [True] * how.slow, way.__name__
