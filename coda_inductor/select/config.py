# SPDX-License-Identifier: Apache-2.0
"""Kernel configs: their properties, and the legal ones for a program."""

import functools
import math
import re
from dataclasses import dataclass, replace

from coda_inductor.arch import HOPPER, Arch
from coda_inductor.errors import KernelError
from coda_inductor.mainloop.readings import reading_of
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import WIDTHS

_TEXT = re.compile(r"NxN:NxN:(pp|co)(:lean)?(:dyn)?".replace("N", r"([1-9]\d*)"))


@dataclass(frozen=True)
class Config:
    """How a kernel computes its GEMM.

    Attributes:
        tile_m, tile_n: rows and columns of the output that one CTA computes at a time.
        cluster_m, cluster_n: a cluster of CTAs that share loads.
        pingpong: the schedule: ping-pong (two consumer warpgroups on two tiles) or cooperative (all
            of them on one tile).
        lean: the epilogue has small buffers and the main loop more memory (``mainloop.lean``).
        dynamic: a cluster takes its next tile from a counter in memory, not by a fixed step, so no
            tile waits for processors that another kernel holds. Blackwell always does this.
    """

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool
    lean: bool = False
    dynamic: bool = False

    def __str__(self) -> str:
        sizes = f"{self.tile_m}x{self.tile_n}:{self.cluster_m}x{self.cluster_n}"
        schedule = "pp" if self.pingpong else "co"
        return f"{sizes}:{schedule}{':lean' * self.lean}{':dyn' * self.dynamic}"

    @staticmethod
    def parse(text: str) -> "Config":
        """The config of a text, the inverse of ``str``. Each config has one text.

        Raises:
            KernelError: if ``text`` is not of the form "128x192:2x1:pp", perhaps followed by
                ":lean" and ":dyn", in this order.
        """
        if (match := _TEXT.fullmatch(text)) is None:
            raise KernelError(
                f"{text!r} is not a kernel config: write it like '128x192:2x1:pp', optionally "
                "followed by ':lean' and ':dyn', in this order"
            )
        *sizes, schedule, lean, dynamic = match.groups()
        tile_m, tile_n, cluster_m, cluster_n = map(int, sizes)
        flags = schedule == "pp", bool(lean), bool(dynamic)
        return Config(tile_m, tile_n, cluster_m, cluster_n, *flags)

    def tile_refusal(self, arch: Arch) -> str | None:
        """The reason why there is no kernel with this tile and schedule on ``arch``, or None."""
        if arch.widest is None:
            return None
        m, n = self.tile_m, self.tile_n
        if self.cluster_m * self.cluster_n > 4:
            return "a cluster has at most 4 CTAs"
        widest = arch.widest[not self.pingpong].get(m, 0)
        if not 0 < n <= widest or n % 16:
            return f"{m} rows need multiples of 16 up to {widest} columns"
        return None

    def dynamic_twin(self) -> "Config":
        """The same config for Hopper, but with tiles from a counter: as fast on a free GPU, and not
        delayed by another kernel that holds some processors."""
        return replace(self, dynamic=True)

    def cta_tile_m(self, arch: Arch) -> int:
        """The number of output rows of one CTA, which are the rows of one column partial."""
        halves = arch.two_ctas and self.cluster_m % 2 == 0 and self.tile_m in (128, 256)
        return self.tile_m // 2 if halves else self.tile_m


@functools.cache
def configs_in(text: str) -> tuple[Config, ...]:
    """The configs that ``text`` lists."""
    return tuple(map(Config.parse, text.split()))


#: Bytes of a row or column of A and B in one step of the main loop.
_STEP_BYTES = 128


def epilogue_tile(program: EpilogueProgram, config: Config, arch: Arch = HOPPER) -> tuple[int, int]:
    """(rows, columns) of the tiles that an epilogue moves through shared memory at a time."""
    wide = math.gcd(arch.columns if program.loads else 32, config.tile_n)
    columns = 16 if config.lean else wide
    # Ping-pong: the rows of one warpgroup.
    return 64 if config.pingpong else min(config.cta_tile_m(arch), arch.rows), columns


def mainloop_stages(program: EpilogueProgram, config: Config, arch: Arch = HOPPER) -> int:
    """The number of K steps of A and B that fit into shared memory beside the epilogue's buffers:
    ``arch.stages`` of each tile load; two of each tile store, four if it is narrow; vectors once.
    Lean epilogues have two stages of everything."""
    rows, columns = epilogue_tile(program, config, arch)
    tiles = config.cta_tile_m(arch) * config.tile_n // (rows * columns)
    load_stages = 2 if config.lean else min(tiles, arch.stages[0])
    store_stages = 2 if config.lean else min(tiles, 4 if columns <= 16 else 2)
    stored = sum(WIDTHS[s.dtype] for s in program.stores) / len(program.accs)
    loaded = sum(WIDTHS[o.dtype] for o in program.loads)
    tile_bytes = rows * columns * (store_stages * stored + load_stages * loaded)
    tile = config.tile_m, config.tile_n
    vectors = sum(WIDTHS[o.dtype] * o.spec.resident(*tile) for o in program.read)
    # Warps that share a column add their sums in shared memory.
    columns_summed = sum(reduce.axis == "col" for reduce in program.reduces)
    vectors += 4 * config.tile_n * (rows // 16 - 1) * columns_summed
    # A pair of CTAs that multiply together has half of A and half of B each.
    pair = config.tile_m // config.cta_tile_m(arch)
    step_bytes = (config.tile_m + config.tile_n) // pair * _STEP_BYTES
    return int((arch.smem_bytes - 2048 - tile_bytes - vectors) // step_bytes)


@functools.lru_cache(maxsize=1024)  # a model has each program many times
def legal_configs(
    program: EpilogueProgram, arch: Arch = HOPPER, terms: int = 1
) -> tuple[Config, ...]:
    """Configs that compile for ``program`` on ``arch``, in a fixed order; none if QuACK has no
    kernels. With a counter in memory, the dynamic twin of each is legal as well. ``terms``: the
    number of products in the accumulator.
    """
    reading = reading_of(program, terms)
    fits = [c for c in every_config(program, arch) if reading.suits(program, c)]
    if program.head:
        fits = [c for c in fits if whole_heads(program, c, arch)]
    stages = {config: mainloop_stages(program, config, arch) for config in fits}
    least = arch.stages[1]
    special = _kind_configs(program, arch)
    usual = fits if special else [c for c in fits if c not in configs_in(arch.rare)]
    # A load takes longer than the multiplication before it.
    deep = [c for c in usual if stages[c] > least] or [c for c in usual if stages[c] == least]
    if program.grouped or not deep:  # if only tiny tiles fit, too
        return tuple(deep)
    if special:  # the first one runs until a site is measured: it needs enough stages
        return tuple(sorted(deep, key=lambda config: stages[config] < 4))
    return (*deep, *(c for c in fits if c not in usual and stages[c] >= 3))


def every_config(program: EpilogueProgram, arch: Arch = HOPPER) -> tuple[Config, ...]:
    """All candidates for ``program``, legal or not. Lean configs are for programs that load a tile
    or a table, with loads and stores of at most 16 bits."""
    dtypes = [o.dtype for o in program.loads] + [s.dtype for s in program.stores]
    lean = bool(program.loads) and all(WIDTHS[dtype] <= 2 for dtype in dtypes)
    common = configs_in(f"{arch.configs.get('common', '')} {arch.rare}")
    return tuple(c for c in _kind_configs(program, arch) or common if lean or not c.lean)


@functools.lru_cache(maxsize=1024)
def _kind_configs(program: EpilogueProgram, arch: Arch) -> tuple[Config, ...]:
    kind = reading_of(program).kind(program)
    if kind == "common" or kind not in arch.configs:
        return ()
    static = [twin for c in configs_in(arch.configs[kind]) for twin in (replace(c, lean=True), c)]
    return (*static, *(config.dynamic_twin() for config in static))


def whole_heads(program: EpilogueProgram, config: Config, arch: Arch = HOPPER) -> bool:
    """Does each tile of ``config``, and each tile that an epilogue moves, consist of whole heads or
    a part of one head? Loading tables and summing require that."""
    # On a tile of 64 rows of two CTAs each warp has half of the columns: tables cannot do that.
    halves = arch.two_ctas and config.cta_tile_m(arch) == 64
    columns = epilogue_tile(program, config, arch)[1]
    return config.tile_n % program.head == 0 == program.head % columns and not halves
