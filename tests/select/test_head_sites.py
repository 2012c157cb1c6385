# SPDX-License-Identifier: Apache-2.0
"""Where programs that know heads have kernels, and what they are expected to cost."""

from __future__ import annotations

import dataclasses

import pytest
from programs import heads, kinds, rotary

from coda_inductor.select import legality
from coda_inductor.select.choice import select
from coda_inductor.select.config import epilogue_tile, legal_configs, mainloop_stages
from coda_inductor.select.device import H100
from coda_inductor.select.legality import unsupported
from coda_inductor.select.roofline import around_us, table_traffic
from coda_inductor.select.site import Site

ROTARY = kinds()["rotary"]


def plain(program):
    """The same without its heads."""
    return dataclasses.replace(kinds()["scale"], stores=program.stores[:1])


@pytest.mark.parametrize("arch", [9, 10, 12])
@pytest.mark.parametrize("name", list(heads()))
def test_tiles_are_made_of_whole_heads(name, arch):
    program = heads()[name]
    for config in legal_configs(program, arch):
        assert config.tile_n % program.head == 0
        assert program.head % epilogue_tile(program, config, arch)[1] == 0
        assert arch != 10 or config.cta_tile_m(arch) == 128


#: What has none on a generation, and why.
WITHOUT = {
    9: {},
    10: {
        "halves_80": "tiles",
        "halves_96": "tiles",
        "part_of_80": "tiles",
    },
    12: {
        **dict.fromkeys(("halves_80", "part_of_80"), "40 apart|16 apart"),
        "halves_96": "48 apart",
        "part_of_64": "8 apart",
        "halves_256": "tiles",
    },
}


@pytest.mark.parametrize("arch", list(WITHOUT))
@pytest.mark.parametrize("name", list(heads()))
def test_what_has_kernels(name, arch, monkeypatch):
    monkeypatch.setattr(legality, "arch_of", lambda _: arch)
    why = unsupported(heads()[name], 10 * heads()[name].head, 1024)
    wanted = WITHOUT[arch].get(name)
    assert (why is None) == (wanted is None)
    if why is not None:
        assert any(part in why.text for part in wanted.split("|"))


@pytest.mark.parametrize(
    ("program", "n", "code", "text"),
    [
        (ROTARY, 1096, "head-columns", "N=1096 is not made of heads of 128"),
        (rotary(112), 1120, "head-columns", "no kernel's tiles are made of heads of 112"),
        (rotary(80, tables="float32"), 1280, "head-columns", "heads of 80"),
        (rotary(96, 24), 1536, "head-distance", "columns 12 apart"),
        (rotary(64, 64, 2), 1024, "head-distance", "2 apart: kernels have neighbours, and multip"),
    ],
)
def test_reasons(program, n, code, text):
    why = unsupported(program, n, 1024)
    assert (why.code, why.failure) == (code, True)
    assert text in why.text


def test_tables_take_shared_memory():
    config = legal_configs(ROTARY)[0]
    tiles = dataclasses.replace(
        ROTARY,
        operands=tuple(dataclasses.replace(o, kind="tile") for o in ROTARY.operands[1:]),
        head=0,
    )
    assert mainloop_stages(ROTARY, config) == mainloop_stages(tiles, config)
    assert mainloop_stages(ROTARY, config) < mainloop_stages(plain(ROTARY), config)


def test_lean_epilogues_are_for_tables_too():
    assert any(config.lean for config in legal_configs(ROTARY))
    wide = rotary(128, tables="float32")
    assert not any(config.lean for config in legal_configs(wide))


def test_a_table_is_read_once():
    assert table_traffic(ROTARY, 128) == 2 * 2
    assert table_traffic(ROTARY, 4096) == 2 * 2 * 128 / 4096
    apart = Site(ROTARY, 8192, 4096, 4096), Site(plain(ROTARY), 8192, 4096, 4096)
    more = around_us(apart[0], H100) - around_us(apart[1], H100)
    assert more == pytest.approx(8192 * 128 * 2 * 2 / H100.bytes_per_us)


def test_a_rotation_is_expected_to_cost_what_it_saves():
    """As measured at 8B widths; where it wins, a measurement says so."""
    choice = select(Site(ROTARY, 8192, 4096, 3072), gated=True)
    assert (choice.how, choice.refusal.code) == ("unfused", "expected-slower")
