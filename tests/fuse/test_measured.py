# SPDX-License-Identifier: Apache-2.0
"""With ``tune`` "always" sites are measured, and a graph is planned again. Nothing is run: the
tensors are on the meta device, the GPU is pretended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from measured import HOPPER, configs, figures
from torch import nn
from torch._inductor import config
from torch.utils._pytree import tree_map
from zoo.layers import Gated

from coda_inductor.compat import BackendCompilerFailed
from coda_inductor.gpu import H100
from coda_inductor.lowering import driver
from coda_inductor.mainloop import availability
from coda_inductor.options import parse
from coda_inductor.record import Record
from coda_inductor.report import SiteReport
from coda_inductor.select.figures import key_of
from coda_inductor.select.measurements import Measurements
from coda_inductor.select.site import Site
from coda_inductor.tracing import dry_run

CUDA = torch.device("cuda", 0)
M, D, HIDDEN = 5000, 2560, 6912


@dataclass
class Measurer:
    """Answers from ``us`` what the first config of a site takes, of 100 us unfused, or None: there
    was no time for it. ``asked`` are names of sites, a list a round."""

    store: Measurements
    us: Callable[[Site], float | None]
    asked: list[list[str]] = field(default_factory=list)
    closed: int = 0
    given: tuple = ()

    def measure(self, sites: Sequence[Site]) -> bool:
        assert not self.closed
        self.asked.append([site.name for site in sites])
        new = False
        for site in sites:
            if self.store.find(site) is None and (us := self.us(site)) is not None:
                new = True
                self.store.add({key_of(site): figures({configs(site)[0]: us}, m=site.m)})
        return new

    def close(self) -> None:
        self.closed += 1


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


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """What plans a model on a GPU with answers of ``us``: gate and up, which may be a pair; down
    with a residual; a projection with a bias."""
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    number = iter(range(100))

    def planned(us=lambda _: 50.0, gpu=H100, mode=None, train=False, store=None, **options):
        torch._dynamo.reset()
        store = store or Measurements(gpu, tmp_path / str(next(number)))
        measurer = Measurer(store, us)

        def tuner(*given):
            measurer.given = given
            return measurer

        monkeypatch.setattr("coda_inductor.plan.measurements_of", lambda _: store)
        monkeypatch.setattr("coda_inductor.plan.gpu_of", lambda _: gpu)
        monkeypatch.setattr(driver, "Tuner", tuner)
        record = Record(parse(mode, options), "test", dry=True, device=CUDA)
        seen = []

        def backend(gm, inputs):
            seen.append(dry_run(gm, inputs, record).whole)
            return gm.forward

        with torch.device("meta"):
            first = Gated(D, HIDDEN, norm=nn.Identity)
            block = nn.Sequential(first, nn.Linear(D, 2 * D), nn.GELU()).bfloat16()
            x = torch.empty(M, D, dtype=torch.bfloat16, requires_grad=train)
        with torch.set_grad_enabled(train):
            torch.compile(block, backend=backend)(x)
        return Planned(record, seen[0], measurer)

    return planned


PAIR, DOWN, OUT = "0.gate + up", "0.down", "1"
ALL = {PAIR, DOWN, OUT}
#: Name -> (GPU, microseconds of a site, what is fused, why the rest is not; is something left?).
OUTCOMES = {
    "what wins is fused": (H100, lambda _: 50.0, ALL, "", False),
    "all lose": (H100, lambda _: 120.0, set(), "measured-slower", False),
    # By its expected time; the next process tries again.
    "no time for one": (H100, lambda site: None if site.name == OUT else 50.0, ALL, "", True),
    "nothing is known, no time": (HOPPER, lambda _: None, set(), "gpu-not-measured", True),
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "us", "fused", "why", "left"), OUTCOMES.values(), ids=OUTCOMES)
def test_what_measurements_decide(gpu, us, fused, why, left, plan):
    found = plan(us, gpu, tune="always")
    assert found.fused == fused
    assert {name for names in found.measurer.asked for name in names} >= ALL
    assert found.measurer.closed == 1
    assert {site.refusal.code for site in found.sites.values() if site.refusal} == {why} - {""}
    assert bool(found.record.failed) == left == bool(found.measurer.store.left())


def test_a_pair_that_is_measured_slower_becomes_two(plan):
    """What its members absorb alone was never asked before: a second plan measures it."""
    found = plan(lambda site: 120.0 if site.program.paired else 50.0, tune="always")
    assert PAIR not in found.sites
    assert found.fused in ({"0.gate", DOWN, OUT}, {"0.up", DOWN, OUT})
    first, second, *_ = found.measurer.asked
    assert PAIR in first
    assert {"0.gate", "0.up"} & set(second)
    assert PAIR not in second


def test_refusing_everything_is_as_if_nothing_could_be_fused(plan):
    """A graph that was restored is the graph that it was."""

    def structure(planned):
        number = {node: index for index, node in enumerate(planned.graph.nodes)}
        return [
            (n.op, "" if n.op == "placeholder" else str(n.target), str(n.meta.get("val")),
             tree_map(lambda x: number.get(x, x), (n.args, n.kwargs)))
            for n in planned.graph.nodes
        ]  # fmt: skip

    never = plan(gate="always", tune="never", disable=["fuse"], train=True)
    assert structure(never) == structure(plan(lambda _: 120.0, tune="always", train=True))


def test_what_fails_while_planning_still_ends_the_processes(plan, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "restore", broken)
        found = plan(tune="always")
        assert found.measurer.closed == 1
        assert found.record.failed  # the pass is left out
        with pytest.raises(BackendCompilerFailed, match="broken"):
            plan(tune="always", strict=True)


def test_only_who_asks_waits_for_measurements(plan):
    for options in ({}, {"tune": "never"}, {"mode": "max-autotune", "tune": "never"}):
        assert not plan(**options).measurer.given
    found = plan(mode="max-autotune")
    assert found.measurer.given == (found.measurer.store, CUDA, 60.0)
    with config.patch(max_autotune=True):
        assert plan().measurer.given[2] == 60.0
    assert plan(tune="always", tune_seconds=5).measurer.given[2] == 5.0


def test_what_was_measured_on_a_gpu_without_a_table_is_used(plan):
    asked = plan(gpu=HOPPER, tune="always")
    found = plan(gpu=HOPPER, store=asked.measurer.store)
    assert not found.measurer.given
    assert found.fused == asked.fused == ALL
    assert not plan(gpu=HOPPER).fused
