# SPDX-License-Identifier: Apache-2.0
"""What a peak leaves for a step is known before a graph is traced, and is part of its cache key."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from coda_inductor import joint
from coda_inductor.memory import limit as rooms

GIB = 2**30


@pytest.fixture
def device(monkeypatch):
    """A device that holds 3 GiB, of which torch has freed 1, and has 10 GiB free."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 80 * GIB))
    return torch.device("cuda", 0)


@pytest.mark.parametrize(("setting", "left"), [(7 * GIB, 5.0), ("fit", 0.95 * 11), (GIB, -1.0)])
def test_what_is_left_is_rounded_down(setting, left, device):
    room = rooms.room(setting, device)
    assert 0 <= left - room / GIB <= 0.01 * abs(left)


def test_with_less_room_the_plan_of_an_earlier_process_is_not_run(monkeypatch):
    def step(room):
        monkeypatch.setattr(joint, "_room", lambda *_: room)
        torch._dynamo.reset()
        counters.clear()
        x = torch.randn(64, 64, requires_grad=True)
        options = {"memory": "1 GiB", "gate": "always"}
        torch.compile(lambda x: (x @ x).sin().sum(), backend="coda", options=options)(x).backward()
        return counters["aot_autograd"]["autograd_cache_hit"]

    caches = {"fx_graph_cache": True, "force_disable_caches": False}
    functorch = torch._functorch.config.patch(enable_autograd_cache=True)
    with fresh_cache(), torch._inductor.config.patch(caches), functorch:
        assert [step(10**12), step(10**12)] == [0, 1]
        with pytest.raises(Exception, match=r"'memory'.*allow .* more"):
            step(10)
