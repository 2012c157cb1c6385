# SPDX-License-Identifier: Apache-2.0
"""Plans for a GPU that is not there, with made-up measurements. Nothing is run: the tensors are on
the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from measured import configs, figures
from torch import nn
from torch.utils._pytree import tree_map

from coda_inductor import pipeline
from coda_inductor.mainloop import availability
from coda_inductor.options import parse
from coda_inductor.pipeline import on_aten, on_dynamo
from coda_inductor.record import Record
from coda_inductor.report import SiteReport
from coda_inductor.select import policy
from coda_inductor.select.device import H100
from coda_inductor.select.figures import key_of
from coda_inductor.select.site import Site
from coda_inductor.select.store import Store
from coda_inductor.tracing import trace

CUDA = torch.device("cuda", 0)
M, D, HIDDEN = 5000, 2560, 6912


class Block(nn.Module):
    """Gate and up, which may be a pair; down with a residual; a projection with a bias."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(D, HIDDEN, bias=False) for _ in range(2))
        self.down, self.out = nn.Linear(HIDDEN, D, bias=False), nn.Linear(D, 2 * D)

    def forward(self, x):
        y = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return F.gelu(self.out(y))


@dataclass
class Measurer:
    """Answers from ``us`` what the first config of a site takes, of 100 us unfused.

    Attributes:
        us: site -> microseconds, or None: there was no time for it.
        asked: the names of all sites that it was asked for, a list a round.
    """

    store: Store
    us: Callable[[Site], float | None]
    asked: list[list[str]] = field(default_factory=list)
    left: dict[str, Site] = field(default_factory=dict)
    closed: int = 0
    given: tuple = ()

    def measure(self, sites: Sequence[Site]) -> bool:
        assert not self.closed
        self.asked.append([site.name for site in sites])
        new = False
        for site in sites:
            if self.store.find(site) is None and key_of(site) not in self.left:
                us = self.us(site)
                if us is None:
                    self.left[key_of(site)] = site
                else:
                    new = True
                    found = figures({configs(site)[0]: us}, m=site.m)
                    self.store.add({key_of(site): found})
        return new

    def close(self) -> None:
        self.closed += 1

    @property
    def names(self) -> list[str]:
        """Of all rounds."""
        return [name for names in self.asked for name in names]


@dataclass
class Planned:
    """What became of a graph."""

    record: Record
    graph: torch.fx.Graph
    measurer: Measurer

    @property
    def sites(self) -> dict[str, SiteReport]:
        return {site.site: site for site in self.record.report.sites}

    @property
    def fused(self) -> set[str]:
        return {name for name, site in self.sites.items() if site.how == "kernel"}

    @property
    def structure(self) -> list[tuple]:
        """The graph without the names of nodes and configs."""
        number = {node: index for index, node in enumerate(self.graph.nodes)}
        chosen = {site.config for site in self.sites.values()}

        def plain(x):
            return "config" if isinstance(x, str) and x in chosen else number.get(x, x)

        return [
            (node.op, "" if node.op == "placeholder" else str(node.target),
             tree_map(plain, (node.args, node.kwargs)), str(node.meta.get("val")))
            for node in self.graph.nodes
        ]  # fmt: skip


def planner(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., Planned]:
    """What plans ``model`` on a GPU with answers of ``us``."""
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    number = iter(range(100))

    def planned(
        us=lambda _: 50.0,
        gpu=H100,
        model=Block,
        mode=None,
        train=False,
        m=M,
        d=D,
        store=None,
        **options,
    ):
        torch._dynamo.reset()
        store = store or Store(gpu, folder / str(next(number)))
        measurer = Measurer(store, us)

        def tuner(*given):
            measurer.given = given
            return measurer

        monkeypatch.setattr(policy, "store_of", lambda _: store)
        monkeypatch.setattr(policy, "gpu_of", lambda _: gpu)
        monkeypatch.setattr(pipeline, "Tuner", tuner)
        record = Record(parse(mode, options), "test", dry=True, as_if=CUDA)
        seen = []

        def backend(gm, inputs):
            on_dynamo(gm, record)
            seen.append(trace(gm, inputs, lambda graph: on_aten(graph, record)).whole)
            return gm.forward

        with torch.device("meta"):
            block = model().bfloat16()
            x = torch.empty(m, d, dtype=torch.bfloat16, requires_grad=train)
        with torch.set_grad_enabled(train):
            torch.compile(block, backend=backend)(x)
        return Planned(record, seen[0], measurer)

    return planned
