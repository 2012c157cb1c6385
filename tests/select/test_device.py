# SPDX-License-Identifier: Apache-2.0
"""Which GPU a decision is for, and what is known of it."""

import types
from dataclasses import replace

import pytest
import torch
from measured import borrowing, table

from coda_inductor import gpu as device
from coda_inductor.arch import arch_with
from coda_inductor.gpu import H100, gpu_of, match_gpu, read, tables


@pytest.fixture
def machine(monkeypatch):
    """A machine whose only GPU is what the test says."""

    def has(name: str, capability: tuple[int, int] = (9, 0), processors: int = 132):
        device._gpu.cache_clear()
        tables.cache_clear()
        found = types.SimpleNamespace(
            name=name, major=capability[0], minor=capability[1],
            multi_processor_count=processors,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)

    yield has
    device._gpu.cache_clear()
    tables.cache_clear()


def test_tables_that_ship_are_tables_and_others_are_an_error(tmp_path):
    shipped = tables(None)
    assert H100.name in shipped
    assert all(read(gpu.sites) == gpu for gpu in shipped.values())
    path = tmp_path / "x.json"
    path.write_text('{"constants": {"capability": 9}}')
    with pytest.raises((ValueError, KeyError, TypeError)):
        read(path)


def test_what_is_known_of_a_model(tmp_path):
    """One with a table has its constants, another of its generation borrows, one of another
    generation has an H200's and is not rated."""
    slower = replace(table(tmp_path, "NVIDIA H900"), bytes_per_us=1.0)
    gpu = match_gpu("NVIDIA H900", (9, 0), 114, {slower.name: slower})
    assert gpu == replace(slower, processors=114)
    gpu = match_gpu("NVIDIA H900", (9, 0), 78, {H100.name: H100})
    assert (gpu.rated, gpu.sites, gpu.bytes_per_us) == (True, None, H100.bytes_per_us)
    assert gpu.flops_per_us == H100.flops_per_us * 78 / 132
    assert (gpu.name, gpu.processors) == ("NVIDIA H900", 78)
    gpu = match_gpu("NVIDIA B200", (10, 0), 148, {H100.name: H100})
    assert (gpu.rated, gpu.sites) == (False, None)
    assert gpu.bytes_per_us == tables(None)["NVIDIA H200"].bytes_per_us
    assert (gpu.capability, gpu.arch) == ((10, 0), arch_with((10, 0)))
    assert (gpu.name, gpu.processors) == ("NVIDIA B200", 148)


def test_the_gpu_of_this_machine_and_a_folder_of_tables(machine, monkeypatch, tmp_path):
    """Without a GPU an H100 is meant. A folder takes the place of what ships, also an empty one."""
    monkeypatch.delenv("CODA_TABLES", raising=False)
    machine("NVIDIA B200", (10, 0), 148)
    assert not gpu_of("cuda").rated
    machine(H100.name)
    assert gpu_of() == gpu_of("cuda:0") == H100
    monkeypatch.setenv("CODA_TABLES", str(tmp_path))
    assert not gpu_of().rated
    mine = table(tmp_path, "NVIDIA H900")
    machine("NVIDIA H900")
    assert gpu_of() == mine
    machine(H100.name)  # its shipped one does not count
    assert gpu_of() == borrowing(mine, H100.name)
    monkeypatch.delenv("CODA_TABLES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_of() == gpu_of("cpu") == gpu_of("cuda:1") == H100
