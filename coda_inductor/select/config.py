# SPDX-License-Identifier: Apache-2.0
"""Kernel configs: what they are, which are legal for a program, and which one to use."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace

from coda_inductor.errors import KernelError
from coda_inductor.mainloop.readings import reading_of
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.select.device import H100

_TEXT = re.compile(r"NxN:NxN:(pp|co)(:lean)?(?::swN)?(:dyn)?(?::kN)?".replace("N", r"([1-9]\d*)"))
_SWIZZLE = 8  # QuACK's


@dataclass(frozen=True)
class Config:
    """How a kernel computes its GEMM.

    Attributes:
        tile_m, tile_n: rows and columns of the output that one CTA computes at a time.
        cluster_m, cluster_n: a cluster of CTAs that share loads.
        pingpong: the schedule: ping-pong (two consumer warpgroups on two tiles) or cooperative (all
            of them on one tile).
        lean: the epilogue has small buffers and the main loop more memory (``mainloop.lean``).
        swizzle: width, in clusters, of the band in which tiles are visited, so that they share
            data in the L2 cache.
        dynamic: a cluster takes its next tile from a counter in memory, not by a fixed step, so
            none waits for processors that another kernel holds. On Hopper; Blackwell always does.
        split_k: K is divided among this many CTAs; the last adds their sums up, in order.

    ``swizzle`` is an argument of a launch, all others are compiled in.
    """

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool
    lean: bool = False
    swizzle: int = _SWIZZLE
    dynamic: bool = False
    split_k: int = 1

    def __str__(self) -> str:
        parts = [
            f"{self.tile_m}x{self.tile_n}",
            f"{self.cluster_m}x{self.cluster_n}",
            "pp" if self.pingpong else "co",
        ]
        parts += ["lean"] * self.lean
        parts += [f"sw{self.swizzle}"] * (self.swizzle != _SWIZZLE)
        parts += ["dyn"] * self.dynamic
        parts += [f"k{self.split_k}"] * (self.split_k != 1)
        return ":".join(parts)

    @staticmethod
    def parse(text: str) -> Config:
        """Inverse of ``str``: each config has one text.

        Raises:
            KernelError: if ``text`` is not of the form "128x192:2x1:pp", perhaps followed by
                ":lean", ":sw4", ":dyn" and ":k2", in this order.
        """
        if (match := _TEXT.fullmatch(text)) is None:
            raise KernelError(
                f"{text!r} is not a kernel config: write it like '128x192:2x1:pp', optionally "
                "followed by ':lean', ':sw4', ':dyn', ':k2', in this order"
            )
        tile_m, tile_n, cluster_m, cluster_n = map(int, match.groups()[:4])
        schedule, lean, swizzle, dynamic, split_k = match.groups()[4:]
        tail = bool(lean), int(swizzle or _SWIZZLE), bool(dynamic), int(split_k or 1)
        config = Config(tile_m, tile_n, cluster_m, cluster_n, schedule == "pp", *tail)
        if str(config) != text:
            raise KernelError(f"{text!r} is not the form of this kernel config: write {config}")
        return config

    @property
    def unwritten(self) -> str | None:
        """Why there is no kernel with this tile and schedule on Hopper, or None.

        QuACK's cooperative kernels of 192 and 320 rows are left out. In most of them two warpgroups
        share the columns of a tile: with an N-major B CuTeDSL ends the process, lean and paired
        epilogues are silently wrong, and the correct kernels are not the fastest.
        """
        m, n = self.tile_m, self.tile_n
        if self.cluster_m * self.cluster_n > 4:
            return "a cluster has at most 4 CTAs"
        by_rows = {64: 256, 128: 208, 192: 128} if self.pingpong else {64: 256, 128: 256, 256: 208}
        widest = by_rows.get(m, 0)
        if not 0 < n <= widest or n % 16:
            return f"{m} rows need multiples of 16 up to {widest} columns"
        return None

    def dynamic_twin(self) -> Config:
        """The same on Hopper, but with tiles from a counter: as fast on a free GPU, and not delayed
        by another kernel that holds some processors."""
        return replace(self, dynamic=True)

    def cta_tile_m(self, arch: int) -> int:
        """Rows of the output that one CTA owns, which are the rows of one column partial. Data
        center Blackwell splits the tile over the two CTAs of a pair."""
        two_ctas = arch in (10, 11) and self.cluster_m % 2 == 0 and self.tile_m in (128, 256)
        return self.tile_m // 2 if two_ctas else self.tile_m


def _configs(*lines: str, more: str = "") -> tuple[Config, ...]:
    return tuple(Config.parse(f"{text}{more}") for line in lines for text in line.split())


#: The candidates on Hopper (compute capability 9).
HOPPER = _configs(
    "128x192:2x1:pp 128x160:2x1:pp 128x128:2x1:pp 128x208:2x1:pp",
    "192x128:2x1:pp 128x192:1x2:pp 128x160:1x2:pp 128x128:1x2:pp",
    "128x256:2x1:co 256x128:2x1:co 256x192:2x1:co 256x208:2x1:co",
    "256x160:2x1:co 256x192:1x2:co 256x128:1x2:co 128x256:1x2:co",
)
#: More of them, for programs that load tiles and have only 16-bit tiles.
HOPPER_LEAN = _configs(
    "128x192:2x1:pp 128x160:2x1:pp 128x128:2x1:pp 128x192:1x2:pp",
    "128x128:1x2:pp 128x128:2x2:pp 128x192:2x2:pp 128x256:2x1:co",
    "256x128:2x1:co 128x256:1x2:co 256x128:1x2:co 256x192:2x1:co",
    more=":lean",
)
_USUAL = "128x192:2x1:pp 128x160:2x1:pp 128x128:2x1:pp"
#: One of these runs in 16 bits on Hopper if no similar site was measured.
DEFAULTS = frozenset(
    _configs(_USUAL, "128x256:2x1:co") + _configs(_USUAL, "128x256:2x1:co", more=":lean")
)
#: More configs that are the fastest at some site by more than 1 %: other bands or shapes for many
#: rows, small tiles for few, and dynamic twins of the main ones.
HOPPER_MORE = (
    *_configs("128x192:2x1:pp:sw16 128x208:2x1:pp:lean 256x160:1x2:co:lean"),
    *_configs("128x64:2x1:pp 64x64:1x1:pp 64x128:1x1:pp 64x32:1x1:co"),
    *_configs("64x64:1x1:co:k2 64x64:1x1:co:k4"),
    *_configs(_USUAL, more=":dyn"),
    *_configs(_USUAL, more=":lean:dyn"),
    *_configs("128x256:2x1:co 256x128:2x1:co", more=":dyn"),
)


#: On data center Blackwell; the first one runs until a site is measured.
BLACKWELL = _configs(
    "256x256:2x1:co 256x224:2x1:co 256x192:2x1:co 256x160:2x1:co",
    "256x128:2x1:co 128x256:2x1:co 128x192:2x1:co 128x128:2x1:co",
    "256x256:2x2:co 256x128:2x2:co 128x256:1x1:co 128x192:1x1:co",
    "128x128:1x1:co 128x64:1x1:co 128x32:1x1:co 128x128:1x1:co:k4",
)
#: On consumer Blackwell, which has no clusters.
BLACKWELL_CONSUMER = _configs(
    "128x128:1x1:pp 128x64:1x1:pp 64x128:1x1:pp 128x160:1x1:pp",
    "128x128:1x1:co 128x192:1x1:co 64x64:1x1:pp 64x32:1x1:co",
)
#: By major compute capability. Others have no kernels.
_CANDIDATES = {10: BLACKWELL, 11: BLACKWELL, 12: BLACKWELL_CONSUMER}
#: Shared memory of a CTA, where it differs from an H100's.
_SMEM_BYTES = {12: 99 * 1024}

#: Bytes of a row or column of A and B in one step of the main loop.
_STEP_BYTES = 128


def epilogue_tile(program: EpilogueProgram, config: Config, arch: int = 9) -> tuple[int, int]:
    """(rows, columns) of the tiles that an epilogue moves through shared memory at a time."""
    if arch in (10, 11):
        return config.cta_tile_m(arch), math.gcd(64 if program.loads else 32, config.tile_n)
    columns = 16 if config.lean else math.gcd(32, config.tile_n)
    if config.pingpong or arch == 12:
        return 64, columns  # one warpgroup's rows
    return min(config.tile_m, 128), columns


def mainloop_stages(program: EpilogueProgram, config: Config, arch: int = 9) -> int:
    """How many K steps of A and B fit into shared memory together with the epilogue's buffers. On
    Hopper these are four stages of each tile load, on Blackwell two; two of each tile store, four
    if it is narrow; vectors once. Lean epilogues have two stages of everything."""
    rows, columns = epilogue_tile(program, config, arch)
    tiles = config.cta_tile_m(arch) * config.tile_n // (rows * columns)
    load_stages = 2 if config.lean else min(tiles, 4 if arch == 9 else 2)
    store_stages = 2 if config.lean else min(tiles, 4 if columns <= 16 else 2)
    stored = sum(WIDTHS[s.dtype] for s in program.stores) / len(program.accs)
    loaded = sum(WIDTHS[o.dtype] for o in program.loads)
    tile_bytes = rows * columns * (store_stages * stored + load_stages * loaded)
    vectors = sum(
        WIDTHS[o.dtype] * (config.tile_n if o.kind == "row" else config.tile_m)
        for o in program.operands
        if o.kind in ("row", "col")
    )
    # Warps that share a column add their sums in shared memory.
    columns_summed = sum(reduce.axis == "col" for reduce in program.reduces)
    vectors += 4 * config.tile_n * (rows // 16 - 1) * columns_summed
    # A pair of CTAs that multiply together has half of A and half of B each.
    pair = config.tile_m // config.cta_tile_m(arch)
    step_bytes = (config.tile_m + config.tile_n) // pair * _STEP_BYTES
    smem_bytes = _SMEM_BYTES.get(arch, H100.smem_bytes)
    return int((smem_bytes - 2048 - tile_bytes - vectors) // step_bytes)


@functools.lru_cache(maxsize=1024)  # a model has each program many times
def legal_configs(program: EpilogueProgram, arch: int = 9, terms: int = 1) -> tuple[Config, ...]:
    """Configs that compile for ``program`` on compute capability ``arch``.x, in a fixed order; none
    if QuACK has no kernels. On Hopper the dynamic twin of each is legal as well. ``terms``: how
    many products the accumulator is the sum of.
    """
    fits = [c for c in every_config(program, arch) if _suits(program, c, terms, arch)]
    if arch != 9:
        return tuple(_deepest(program, fits, 1, arch))
    if _own(program):
        # The first one runs until a site is measured, so it must have enough stages.
        configs = _deepest(program, fits, 2)
        if program.grouped:
            return tuple(configs)
        return tuple(sorted(configs, key=lambda c: mainloop_stages(program, c) < 4))
    more = [c for c in fits if c in HOPPER_MORE and mainloop_stages(program, c) >= 3]
    configs = _deepest(program, [c for c in fits if c not in HOPPER_MORE], 2)
    return (*configs, *more) if configs else ()  # if only tiny tiles fit


def _deepest(
    program: EpilogueProgram, configs: list[Config], least: int, arch: int = 9
) -> list[Config]:
    """Those with more than ``least`` stages, because a load takes longer than the multiplication
    before it; if there are none, those with ``least``."""
    stages = {config: mainloop_stages(program, config, arch) for config in configs}
    return [c for c in configs if stages[c] > least] or [c for c in configs if stages[c] == least]


def every_config(program: EpilogueProgram, arch: int = 9) -> tuple[Config, ...]:
    """The candidates for ``program``, whether legal for it or not. Lean ones are for programs that
    load a tile or a table, with loads and stores of at most 16 bits."""
    if arch != 9:
        return _CANDIDATES.get(arch, ())
    dtypes = [o.dtype for o in program.loads] + [s.dtype for s in program.stores]
    lean = bool(program.loads) and all(WIDTHS[dtype] <= 2 for dtype in dtypes)
    candidates = _own(program) or HOPPER + HOPPER_LEAN + HOPPER_MORE
    return tuple(c for c in candidates if lean or not c.lean)


@functools.lru_cache(maxsize=1024)
def _own(program: EpilogueProgram) -> tuple[Config, ...]:
    """The configs that only its reading has, if any: each lean and not, then their dynamic twins.
    The first one runs until a site is measured."""
    text = reading_of(program).configs(program)
    still = [config for each in text.split() for more in (":lean", "")
             for config in _configs(each, more=more)]  # fmt: skip
    return (*still, *(config.dynamic_twin() for config in still))


def whole_heads(program: EpilogueProgram, config: Config, arch: int = 9) -> bool:
    """Is each of ``config``'s tiles, and each tile that an epilogue moves, made of whole heads or a
    part of one head? Loading tables and summing need that."""
    # If two warps share 64 rows of a pair, each has half of the columns: tables cannot do that.
    halved = arch in (10, 11) and config.cta_tile_m(arch) == 64
    columns = epilogue_tile(program, config, arch)[1]
    return config.tile_n % program.head == 0 == program.head % columns and not halved


def _suits(program: EpilogueProgram, config: Config, terms: int, arch: int = 9) -> bool:
    """Can ``program`` run with ``config``?"""
    if program.head and not whole_heads(program, config, arch):
        return False
    # Measured: the error of a log-sum-exp is too large.
    if config.split_k > 1 and any(reduce.combine == "logsumexp" for reduce in program.reduces):
        return False
    return reading_of(program, terms).suits(program, config)
