# SPDX-License-Identifier: Apache-2.0
"""What ships for a GPU model: the sites that are measured, and the table that is fitted to them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from benchmark_runs import ROOT
from measured import HOPPER, figures

sys.path.insert(0, str(ROOT))
from benchmarks import sites, sweep
from coda_inductor.mainloop import availability
from coda_inductor.select import policy
from coda_inductor.select.choice import select
from coda_inductor.select.config import Config, legal_configs
from coda_inductor.select.device import H100, read, tables
from coda_inductor.select.figures import key_of
from coda_inductor.select.kinds import TERMS, kinds
from coda_inductor.select.model import same_kind, traffic, waves
from coda_inductor.select.store import Device, Store, as_text

H200 = tables(None)["NVIDIA H200"]
CONFIGS = ["128x192:2x1:pp", "128x128:2x1:pp", "256x128:2x1:co", "64x64:1x1:pp"]


def us_of(site, config: str) -> float:
    """Of a GPU that is exactly as the model says."""
    group = sweep.family(site.program)
    passes = waves(group, config, site.m, site.n, 132)
    tile = Config.parse(config)
    step = 5e-7 * tile.tile_m * tile.tile_n
    return passes * (step * site.k + 0.3 * traffic(site.program, site.n)) + 3.0


def measured(names=("scale", "rms_partial", "swiglu", "logsumexp")):
    """Made-up measurements of some kinds' sites."""
    found = {}
    for site in sweep.sites():
        if site.name not in names:
            continue
        legal = set(map(str, legal_configs(site.program)))
        us = {config: us_of(site, config) for config in CONFIGS if config in legal}
        gmacs = len(site.program.accs) * site.m * site.n * site.k / 1e9
        plain = len(site.program.accs) * 5 + 2.5 * gmacs
        found[key_of(site)] = figures(us, 1.3 * min(us.values()), plain, m=site.m, name=site.name,
                                      kind=same_kind(site.program, site.terms))  # fmt: skip
    return found


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """(the table's path, what was measured)."""
    folder = tmp_path_factory.mktemp("sweep")
    source, found = folder / "out.json", measured()
    source.write_text(as_text(HOPPER, found, Device(3.3e6, 1.9)))
    target = folder / "nvidia_h900.json"
    sweep.fit([source], target)
    return target, found


def test_the_table_is_a_gpus(fitted):
    gpu = read(fitted[0])
    assert (gpu.name, gpu.processors, gpu.bytes_per_us) == (HOPPER.name, 132, 3.3e6)
    assert (gpu.host_gemm_us, gpu.capability) == (H100.host_gemm_us, (9, 0))
    assert gpu.table == fitted[0]


def test_its_sites_are_found(fitted, tmp_path):
    path, found = fitted
    store = Store(read(path), tmp_path)
    wanted = [site for site in sweep.sites() if key_of(site) in found]
    assert len(wanted) == len(found) > 20
    for site in wanted:
        kept, where = store.find(site)
        assert where == "shipped"
        assert kept.us == found[key_of(site)].us
        choice = select(site, gated=True, store=store)
        assert (choice.how, choice.ground) == ("kernel", "shipped")
        assert choice.fused_us <= min(kept.us.values()) * 1.015  # closer ones are equal


def test_the_model_is_the_one_that_was_measured(fitted, tmp_path):
    """Between the measured sizes it says what this GPU takes."""
    store = Store(read(fitted[0]), tmp_path)
    site = sweep.Site(kinds()["rms_partial"], 4096, 3072, 3072, TERMS["rms_partial"])
    choice = select(site, gated=True, store=store)
    assert choice.ground == "modelled"
    assert choice.config in CONFIGS
    assert choice.fused_us == pytest.approx(us_of(site, choice.config), rel=0.05)
    assert choice.fused_us == pytest.approx(min(us_of(site, c) for c in CONFIGS), rel=0.05)


def test_only_the_best_configs_ship(tmp_path):
    site = sweep.sites()[0]
    us = {str(c): 50.0 + i for i, c in enumerate(legal_configs(site.program))}
    row = sweep._shipped(key_of(site), figures(us, failed={"64x64:1x1:co": "wrong"}))
    assert row["us"] == dict(list(us.items())[: sweep._BEST])
    assert "failed" not in row


def test_what_something_disturbed_does_not_ship(fitted, tmp_path):
    path, found = fitted
    noisy, *_ = found
    source, target = tmp_path / "out.json", tmp_path / path.name
    disturbed = {**found, noisy: replace(found[noisy], spread=0.2)}
    source.write_text(as_text(HOPPER, disturbed, Device(3.3e6, 1.9)))
    sweep.fit([source], target)
    assert set(Store(read(target), tmp_path)._others) == set(found) - {noisy}


def test_a_table_may_borrow_its_model(fitted, tmp_path):
    path, found = fitted
    source, target = tmp_path / "out.json", path.with_name("nvidia_h901.json")
    gpu = replace(HOPPER, name="NVIDIA H901")
    source.write_text(as_text(gpu, found, Device(4e6, 1.9)))
    sweep.fit([source], target, path.stem)
    gpu = read(target)
    assert (gpu.borrowed, gpu.table, gpu.sites, gpu.bytes_per_us) == (True, path, target, 4e6)
    store = Store(gpu, tmp_path)
    known = next(site for site in sweep.sites() if key_of(site) in found)
    assert select(known, gated=True, store=store).ground == "shipped"
    other = sweep.Site(kinds()["rms_partial"], 4096, 3072, 3072)
    assert select(other, gated=True, store=store).ground == "borrowed"


def test_a_table_is_fitted_again_with_its_own_constants(fitted, tmp_path):
    path, found = fitted
    target, source = tmp_path / path.name, tmp_path / "out.json"
    known = json.loads(path.read_text())
    known["constants"]["host_gemm_us"] = 11.0
    target.write_text(json.dumps(known))
    source.write_text(as_text(HOPPER, found, Device(3.4e6, 1.9)))
    sweep.fit([source], target)
    gpu = read(target)
    assert (gpu.host_gemm_us, gpu.bytes_per_us) == (11.0, 3.4e6)


def test_sites_are_measured_once_each():
    wanted = sweep.sites()
    keys = [key_of(site) for site in wanted]
    assert len(set(keys)) == len(keys) > 50
    assert all(same_kind(site.program, site.terms) for site in wanted)


@pytest.fixture
def traced(monkeypatch):
    """As on a GPU that nothing is known of."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sites, "gpu_of", lambda _: HOPPER)
    monkeypatch.setattr(policy, "gpu_of", lambda _: HOPPER)
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)


def test_the_sites_of_layers_of_any_width(traced):
    """Each width and number of rows has as many, none is there twice, and all can be fused."""
    widths = [(2048, 8192, 512), (8192, 28672, 1024)]
    found = sites.layers(widths, [2048, 5000, 8192], torch.bfloat16)
    one = found[: len(found) // 6]
    assert len(one) >= 12
    assert len(found) == 6 * len(one)
    assert len({key_of(site) for site in found}) == len(found)
    assert {site.m for site in found} == {2048, 5000, 8192}
    assert all(legal_configs(site.program) for site in found)
    names = {(site.n, site.k) for site in one}
    assert {(8192, 2048), (2048, 8192), (512, 2048), (2048, 2048)} <= names
    assert any(site.program.paired for site in one)
    assert any(site.terms > 1 for site in one)


def test_sites_whose_measurements_ship_are_traced_as_well(traced, monkeypatch):
    """A GPU with a table has as many sites to measure as one without."""
    width = [(2048, 8192, 512)]
    unknown = sites.layers(width, [8192], torch.bfloat16)
    for module in (sites, policy):
        monkeypatch.setattr(module, "gpu_of", lambda _: replace(HOPPER, sites=H200.sites))
    sites._traced.cache_clear()
    assert Store(H200).find(unknown[0]) is not None
    assert sites.layers(width, [8192], torch.bfloat16) == unknown


def test_long_sites_are_measured_again_by_their_best_configs(monkeypatch):
    """Not those of short products, and none that nothing is known of."""
    long, short, other = sweep.sites()[:3]
    us = dict(zip(CONFIGS, (230.0, 210.0, 240.0, 220.0), strict=True))
    known = {
        key_of(long): replace(figures(us, 260.0), plain=201.0),
        key_of(short): replace(figures(us, 260.0), plain=199.0),
    }
    wanted = []
    monkeypatch.setattr(sweep.Tuner, "__init__", lambda self, most: setattr(self, "most", most))
    monkeypatch.setattr(sweep.Tuner, "measure", lambda _, sites: wanted.extend(sites))
    again = sweep._Again(known, 2)
    again.measure([long, short, other])
    assert wanted == [long]
    assert list(map(str, again._configs(long))) == ["128x128:2x1:pp", "64x64:1x1:pp"]


def test_layers_are_chosen_by_rows_and_size():
    assert sweep._cases("", "") == {m: list(names) for m, names in sweep.LAYERS.items()}
    assert sweep._cases("8192,1000", "13B,1B") == {8192: ["1B", "13B"], 1000: ["1B"]}
    with pytest.raises(ValueError, match=r"no layers of 77, 9B; there are rows .*8192.*sizes 1B"):
        sweep._cases("77", "9B,1B")


def test_plans_ask_for_what_is_left(traced, tmp_path, monkeypatch):
    """Where an answer makes a plan choose other sites, these are asked for, until none is left."""
    monkeypatch.setattr(sites, "store_of", lambda _: store)
    store, width, rounds = Store(HOPPER, tmp_path), (2048, 8192, 512), 0
    while left := sites.asked(width, 8192, torch.bfloat16):
        rounds += 1
        # Kernels of one GEMM win, all others lose.
        store.add({
            key_of(s): figures({str(legal_configs(s.program)[0]): 2.0 if _several(s) else 1.0}, 1.5)
            for s in left
        })  # fmt: skip
        assert rounds < 5
    assert rounds > 1


def _several(site) -> bool:
    return site.program.paired or site.terms > 1


@pytest.mark.parametrize(
    ("sources", "table", "lender"),
    [
        (["h100_sweep"], "nvidia_h100_80gb_hbm3.json", ""),
        (
            ["h200_sweep", "h200_heads_sites", "h200_sites_loaded"],
            "nvidia_h200.json",
            "nvidia_h100_80gb_hbm3",
        ),
    ],
)
def test_the_shipped_tables_are_made_of_what_is_committed(sources, table, lender, tmp_path):
    shipped = json.loads((H100.table.parent / table).read_text())
    made = tmp_path / table
    made.write_text(json.dumps(shipped))
    sweep.fit([ROOT / f"benchmarks/results/{name}.json" for name in sources], made, lender)
    found = json.loads(made.read_text())
    parts = ("device", "constants", "processors", "models", "cublas", "shapes", "model_of")
    assert {part: found.get(part) for part in parts} == {part: shipped.get(part) for part in parts}
    assert found["sites"] == shipped.get("sites", [])
