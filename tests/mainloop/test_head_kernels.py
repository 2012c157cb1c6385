# SPDX-License-Identifier: Apache-2.0
"""Which register of a thread holds the column that another one changes places with."""

import itertools

import programs
import pytest
import torch

from coda_inductor.program.reference import swap
from coda_inductor.select.config import Config

pytest.importorskip("quack")
import quack.cache

from coda_inductor.mainloop import heads
from coda_inductor.mainloop.build import build


class Seen(Exception):
    """The kernel is traced as far as the tests look."""


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """Program and config -> (QuACK's offsets, each thread's first column, partners). Nothing is
    traced of a kernel that is in a cache."""
    monkeypatch.setattr(quack.cache, "CACHE_DIR", str(tmp_path))

    def trace(name: str, config: str):
        found: list = []
        columns, partners = heads._columns, heads.partners

        def every_thread(ctx):
            offsets, firsts = columns(ctx)
            tile = heads.cute.make_identity_tensor((ctx.tile_M, ctx.tile_N))
            threads = range(ctx.num_epi_threads)
            found.extend(
                (offsets, {ctx.partition_for_epilogue_fn(tile, tidx=t)[0][1] for t in threads})
            )
            return offsets, firsts

        def and_no_further(offsets, firsts, *numbers):
            assert set(firsts) == found[1]
            found.append(partners(offsets, firsts, *numbers))
            raise Seen

        monkeypatch.setattr(heads, "_columns", every_thread)
        monkeypatch.setattr(heads, "partners", and_no_further)
        with pytest.raises(Seen):
            build(programs.heads()[name], Config.parse(config))
        return found

    return trace


@pytest.mark.parametrize(("name", "config"), [
    ("neighbours_in_part", "192x128:2x1:pp"), ("part_of_80", "256x160:1x2:co:lean"),
])  # fmt: skip
def test_partners_are_the_columns_that_change_places(traced, name, config):
    offsets, firsts, partners = traced(name, config)
    program, tile = programs.heads()[name], Config.parse(config)
    (step,) = (step for step in program.steps if step.op == "swap")
    turned = swap(torch.arange(tile.tile_n), program.head, *map(int, step.args[1:])).tolist()
    seen = set()
    for subtile, registers in offsets.items():
        for (row, column), (where, register) in zip(registers, partners[subtile], strict=True):
            other_row, other_column = offsets[where][register]
            assert other_row == row
            for first in firsts:
                assert first + other_column == turned[first + column]
                seen.add(first + column)
    assert seen == {*range(tile.tile_n)}


def of_a_thread(period: int, run: int, wide: int = 128) -> dict:
    """Subtiles of 32 columns of one row, in which a thread has ``run`` of each ``period``."""
    columns = [c for c in range(wide) if c % period < run]
    found: dict = {}
    for subtile, every in itertools.groupby(columns, key=lambda c: (0, c // 32)):
        found[subtile] = [(0, c) for c in every]
    return found


@pytest.mark.parametrize(("period", "run", "firsts", "distance"), [
    (8, 2, {0, 2, 4, 6}, 12),  # Hopper: the thread beside has it
    (8, 2, {1}, 1),  # the pair begins with another thread's column
    (32, 16, {0, 16}, 16),  # consumer Blackwell: the warp beside has it
    (1, 1, {0, 16}, 16),  # before it or behind it, as the thread has it
])  # fmt: skip
def test_what_another_thread_has_is_refused(period, run, firsts, distance):
    with pytest.raises(ValueError, match=f"columns {distance} apart .* not one thread's"):
        heads.partners(of_a_thread(period, run), firsts, 128, 8 * distance, distance)
