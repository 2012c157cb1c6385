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
    """How a kernel goes about its GEMM.

    Attributes:
        tile_m, tile_n: rows and columns of the output that one CTA computes at a time.
        cluster_m, cluster_n: a cluster of CTAs that share loads.
        pingpong: the schedule: ping-pong (two consumer warpgroups on two tiles) or cooperative (all
            of them on one tile).
        lean: the epilogue's buffers are small in favour of the main loop's (``mainloop.lean``).
        swizzle: how many clusters wide the band is in which tiles are walked through, for the L2
            cache's sake.
        dynamic: a cluster takes its next tile from a counter in memory, not every so-manieth one:
            none waits for processors that another kernel holds. On Hopper; Blackwell always does.
        split_k: K is divided among so many CTAs, whose sums the last adds up, in order.

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
        match = _TEXT.fullmatch(text)
        if match is None:
            raise KernelError(
                f"{text!r} is not a kernel config: write it like '128x192:2x1:pp', perhaps "
                "followed by ':lean', ':sw4', ':dyn', ':k2', in this order"
            )
        tile_m, tile_n, cluster_m, cluster_n = map(int, match.groups()[:4])
        schedule, lean, swizzle, dynamic, split_k = match.groups()[4:]
        tail = bool(lean), int(swizzle or _SWIZZLE), bool(dynamic), int(split_k or 1)
        config = Config(tile_m, tile_n, cluster_m, cluster_n, schedule == "pp", *tail)
        if str(config) != text:
            raise KernelError(f"{text!r} is not how this kernel config is written: {config}")
        return config

    @property
    def unwritten(self) -> str | None:
        """Why there is no kernel with this tile and schedule on Hopper, or None.

        QuACK's cooperative ones of 192 and 320 rows are left out. In most of them two warpgroups
        share the columns of a tile: with an N-major B CuTeDSL ends the process, lean epilogues and
        paired ones are silently wrong, and where they are right they are not the fastest.
        """
        m, n = self.tile_m, self.tile_n
        if self.cluster_m * self.cluster_n > 4:
            return "a cluster has at most 4 CTAs"
        by_rows = {64: 256, 128: 208, 192: 128} if self.pingpong else {64: 256, 128: 256, 256: 208}
        widest = by_rows.get(m, 0)
        if not 0 < n <= widest or n % 16:
            return f"{m} rows go with multiples of 16 up to {widest} columns"
        return None

    def dynamic_twin(self) -> Config:
        """The same on Hopper, but for taking its tiles from a counter: as fast on a free GPU, and
        not held up by another kernel on some of its processors."""
        return replace(self, dynamic=True)

    def cta_tile_m(self, arch: int) -> int:
        """Rows of the output that one CTA owns, and so that one column partial covers. Data-centre
        Blackwell splits the tile over the two CTAs of a pair."""
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
#: More of them, for programs that load tiles, all of their tiles being 16-bit.
HOPPER_LEAN = _configs(
    "128x192:2x1:pp 128x160:2x1:pp 128x128:2x1:pp 128x192:1x2:pp",
    "128x128:1x2:pp 128x128:2x2:pp 128x192:2x2:pp 128x256:2x1:co",
    "256x128:2x1:co 128x256:1x2:co 256x128:1x2:co 256x192:2x1:co",
    more=":lean",
)
_USUAL = "128x192:2x1:pp 128x160:2x1:pp 128x128:2x1:pp"
#: One of these runs in 16 bits on Hopper where nothing alike was measured.
DEFAULTS = frozenset(
    _configs(_USUAL, "128x256:2x1:co") + _configs(_USUAL, "128x256:2x1:co", more=":lean")
)
#: More that are the fastest somewhere by more than 1 %: with other bands or shapes for many rows,
#: small tiles for few, and the twins of the main ones, which other kernels do not hold up.
HOPPER_MORE = (
    *_configs("128x192:2x1:pp:sw16 128x208:2x1:pp:lean 256x160:1x2:co:lean"),
    *_configs("128x64:2x1:pp 64x64:1x1:pp 64x128:1x1:pp 64x32:1x1:co"),
    *_configs("64x64:1x1:co:k2 64x64:1x1:co:k4"),
    *_configs(_USUAL, more=":dyn"),
    *_configs(_USUAL, more=":lean:dyn"),
    *_configs("128x256:2x1:co 256x128:2x1:co", more=":dyn"),
)


#: On data-centre Blackwell, the first until someone measures.
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
#: By compute capability, major. What is not there has no kernels.
_CANDIDATES = {10: BLACKWELL, 11: BLACKWELL, 12: BLACKWELL_CONSUMER}
#: Shared memory of a CTA, where it is not an H100's.
_SMEM_BYTES = {12: 99 * 1024}

#: Of a row or column of A and B in one step of the main loop.
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
    """How many K steps of A and B fit into shared memory beside the epilogue's buffers (on Hopper
    four stages of each tile load, on Blackwell two, two of each tile store, four if they are
    narrow, vectors once; lean ones have two stages of everything)."""
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
    # Where several warps share a column, their sums meet in shared memory.
    columns_summed = sum(reduce.axis == "col" for reduce in program.reduces)
    vectors += 4 * config.tile_n * (rows // 16 - 1) * columns_summed
    # A pair of CTAs that multiply together has half of A and half of B each.
    pair = config.tile_m // config.cta_tile_m(arch)
    step_bytes = (config.tile_m + config.tile_n) // pair * _STEP_BYTES
    smem_bytes = _SMEM_BYTES.get(arch, H100.smem_bytes)
    return int((smem_bytes - 2048 - tile_bytes - vectors) // step_bytes)


@functools.lru_cache(maxsize=1024)  # a model has each program many times
def legal_configs(program: EpilogueProgram, arch: int = 9, terms: int = 1) -> tuple[Config, ...]:
    """Configs that compile for ``program`` on compute capability ``arch``.x, in an order that never
    changes; none where QuACK has no kernels. On Hopper the dynamic twin of each is legal as well.
    ``terms``: how many products the accumulator is the sum of.
    """
    if arch != 9:
        fits = [c for c in _CANDIDATES.get(arch, ()) if _suits(program, c, terms, arch)]
        return tuple(_deepest(program, fits, 1, arch))
    fits = [c for c in _on_hopper(program) if _suits(program, c, terms)]
    if _own(program):
        # Until a site is measured the first one runs: not one with few stages.
        configs = _deepest(program, fits, 2)
        if program.grouped:
            return tuple(configs)
        return tuple(sorted(configs, key=lambda c: mainloop_stages(program, c) < 4))
    more = [c for c in fits if c in HOPPER_MORE and mainloop_stages(program, c) >= 3]
    configs = _deepest(program, [c for c in fits if c not in HOPPER_MORE], 2)
    return (*configs, *more) if configs else ()  # so heavy that only tiny tiles are left


def _deepest(
    program: EpilogueProgram, configs: list[Config], least: int, arch: int = 9
) -> list[Config]:
    """Those with more than ``least`` stages: a load takes longer than the multiplication before it;
    else those with so many."""
    stages = {config: mainloop_stages(program, config, arch) for config in configs}
    return [c for c in configs if stages[c] > least] or [c for c in configs if stages[c] == least]


def every_config(program: EpilogueProgram, arch: int = 9) -> tuple[Config, ...]:
    """The candidates for ``program``, whether it can be divided so or not."""
    return _on_hopper(program) if arch == 9 else _CANDIDATES.get(arch, ())


def _on_hopper(program: EpilogueProgram) -> tuple[Config, ...]:
    candidates = _own(program) or HOPPER + HOPPER_LEAN + HOPPER_MORE
    lean = _may_be_lean(program)
    return tuple(c for c in candidates if lean or not c.lean)


def _own(program: EpilogueProgram) -> tuple[Config, ...]:
    """Those of its reading alone, if any: each lean and not, then their dynamic twins. The first
    one runs until a site is measured."""
    return _own_of(reading_of(program).configs(program))


@functools.cache
def _own_of(text: str) -> tuple[Config, ...]:
    still = [config for each in text.split() for more in (":lean", "")
             for config in _configs(each, more=more)]  # fmt: skip
    return (*still, *(config.dynamic_twin() for config in still))


def usual(program: EpilogueProgram, arch: int) -> frozenset[Config]:
    """Configs of which one runs where nothing alike was measured; none: the first legal one."""
    return frozenset() if arch != 9 or _own(program) else DEFAULTS


def _may_be_lean(program: EpilogueProgram) -> bool:
    """Is there a tile or a table to load, and nothing but 16 bits and less to load and store?"""
    dtypes = [o.dtype for o in program.loads] + [s.dtype for s in program.stores]
    return bool(program.loads) and all(WIDTHS[dtype] <= 2 for dtype in dtypes)


def whole_heads(program: EpilogueProgram, config: Config, arch: int = 9) -> bool:
    """Is each of ``config``'s tiles, and each that an epilogue moves, one of whole heads or a part
    of one head? So tables are loaded, and sums are taken."""
    # The warps of half a pair's 64 rows have half of the columns each, which tables have not.
    halved = arch in (10, 11) and config.cta_tile_m(arch) == 64
    columns = epilogue_tile(program, config, arch)[1]
    return config.tile_n % program.head == 0 == program.head % columns and not halved


def _suits(program: EpilogueProgram, config: Config, terms: int, arch: int = 9) -> bool:
    """Can ``program`` be divided so?"""
    if program.head and not whole_heads(program, config, arch):
        return False
    # Measured: a log-sum-exp is further off than may be.
    if config.split_k > 1 and any(reduce.combine == "logsumexp" for reduce in program.reduces):
        return False
    return reading_of(program, terms).suits(program, config)
