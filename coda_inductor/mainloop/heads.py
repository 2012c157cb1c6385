# SPDX-License-Identifier: Apache-2.0
"""The exchange of columns within a head (``program.reference.swap``), as a QuACK resource.

No data moves through shared memory: a thread has the same columns of every eight in each row on
Hopper, and whole rows on Blackwell, so exchanged columns are accumulators of the same thread, of
this or another subtile. Tracing determines which: ``Swap`` asks QuACK's own partition for the
columns of each thread, and refuses to trace if a column belongs to another thread.
"""

import itertools
from collections.abc import Iterable

import cutlass.cute as cute
from cutlass import const_expr
from quack.epilogue.ops import EpiOp, GroupedColStatsBase

from coda_inductor.program import Step

#: (row, column) of one of the tiles that an epilogue moves at a time.
Subtile = tuple[int, int]


class Swap(EpiOp):
    """The accumulator, with the columns of each head exchanged. Its launch argument, the number of
    columns of a head, is compiled in."""

    fn_port = "value"

    def __init__(self, step: Step):
        super().__init__(step.name)
        _, width, distance = step.args
        self.pairs = int(width), int(distance)

    def config_key(self):
        return self.pairs

    # A number that is compiled in, as in QuACK's grouped statistics.
    host_arg_key = GroupedColStatsBase.host_arg_key
    host_fake_arg = GroupedColStatsBase.host_fake_arg
    host_call_arg = GroupedColStatsBase.host_call_arg
    host_arg_form = GroupedColStatsBase.host_arg_form
    arg_spec_type = GroupedColStatsBase.arg_spec_type
    param_fields = GroupedColStatsBase.param_fields

    def to_params(self, gemm, args):
        return {self.name: getattr(args, self.name)}

    def begin(self, gemm, param, smem_tensor, ctx):
        """Tell ``HeadAccumulator`` the place of each register's partner."""
        sources = partners(*_columns(ctx), param, *self.pairs)
        vars(gemm).setdefault("partners", {})[self.name] = sources

    def begin_loop(self, gemm, state, epi_coord):
        """A fragment like the accumulator's, which ``HeadAccumulator`` has loaded."""
        return gemm.swapped[self.name]


class HeadAccumulator:  # a mixin for QuACK kernel classes
    """Loads the accumulators that the swaps of a subtile need, of this subtile and others, before
    each subtile: with the last load Blackwell passes its tensor memory to the next tile."""

    partners: dict[str, dict[Subtile, list[tuple[Subtile, int]]]]

    def epilogue(self, *args, **others):
        *bound, load = args  # QuACK passes the function that loads the accumulator last

        def load_with_partners(fragment, subtile, **kwargs):
            self.swapped = {
                name: _load_swapped(registers[subtile], load, fragment)
                for name, registers in self.partners.items()
            }
            load(fragment, subtile, **kwargs)

        return super().epilogue(*bound, load_with_partners, **others)  # type: ignore[misc]


def partners(
    offsets: dict[Subtile, list[tuple[int, int]]], firsts: Iterable[int], head: int, width: int,
    distance: int,
) -> dict[Subtile, list[tuple[Subtile, int]]]:  # fmt: skip
    """For each register of each subtile, the place of the column that it is exchanged with.
    ``offsets``: subtile -> (rows, columns) of its registers, counted from a thread's first element
    of the tile. ``firsts``: the columns of these first elements. Raises ValueError if another
    thread has the column, or its register depends on the thread."""
    positions = {at: (tile, i) for tile, ats in offsets.items() for i, at in enumerate(ats)}

    def move(column: int) -> int:
        back = column // distance % 2
        return 0 if column >= width else -distance if back else distance

    def partner(row: int, column: int) -> tuple[Subtile, int]:
        moves = {move((first + column) % head) for first in firsts}
        position = positions.get((row, column + min(moves)))
        if len(moves) > 1 or position is None:
            raise ValueError(
                f"columns {distance} apart of the first {width} of {head} are not one thread's"
            )
        return position

    return {tile: [partner(*at) for at in ats] for tile, ats in offsets.items()}


def _columns(ctx) -> tuple[dict[Subtile, list[tuple[int, int]]], set[int]]:
    shape = ctx.tile_M, ctx.tile_N

    def partition(**thread):
        whole = ctx.partition_for_epilogue_fn(cute.make_identity_tensor(shape), **thread)
        if const_expr(ctx.tiled_copy_t2r is not None):
            whole = ctx.tiled_copy_r2s.retile(whole)
        return cute.group_modes(whole, 3, cute.rank(whole))

    tile = partition()
    rows, columns = (
        cute.composition(cute.make_layout(shape, stride=stride), tile.layout)
        for stride in ((1, 0), (0, 1))
    )
    high, wide = (cute.size(tile, mode=[3, i]) for i in range(2))
    registers = cute.size(tile) // (high * wide)
    offsets = {}
    for y, x in itertools.product(range(high), range(wide)):
        first = (y + high * x) * registers
        indices = range(first, first + registers)
        offsets[y, x] = [(cute.crd2idx(i, rows), cute.crd2idx(i, columns)) for i in indices]
    # Coordinates are linear in the bits of a thread's number.
    steps = [partition(tidx=1 << bit)[0][1] for bit in range(ctx.num_epi_threads.bit_length() - 1)]
    return offsets, {sum(moves) for moves in itertools.product(*((0, step) for step in steps))}


def _load_swapped(registers: list[tuple[Subtile, int]], load, like):
    parts = {}
    for subtile in dict.fromkeys(subtile for subtile, _ in registers):
        parts[subtile] = cute.make_rmem_tensor(like.layout, like.element_type)
        load(parts[subtile], subtile, no_release=True)
    out = cute.make_rmem_tensor(like.layout, like.element_type)
    for i, (subtile, register) in enumerate(registers):
        out[i] = parts[subtile][register]
    return out
