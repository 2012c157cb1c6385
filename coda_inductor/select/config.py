# SPDX-License-Identifier: Apache-2.0
"""Kernel configs: what they are, which are legal for a program, and which one to use."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from coda_inductor.errors import KernelError
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.select.device import H100

_TEXT = re.compile(
    r"(\d+)x(\d+):(\d+)x(\d+):(pp|co)(:lean)?(?::sw(\d+))?(:dyn|:np)?(?::k(\d+))?(?::p(\d+))?"
)
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
        dynamic: a cluster takes its next tile from a counter in memory, instead of every so-manieth:
            none waits for processors that another kernel holds. On Hopper; Blackwell always does.
        persistent: a cluster works on one tile after the other; if not, each tile has its own, and
            the hardware hands them out. Cooperative only.
        split_k: K is divided among so many CTAs, whose sums the last adds up, in order.
        processors: it runs on at most so many, 0 for all.

    ``swizzle`` and ``processors`` are arguments of a launch, all others are compiled in.
    """

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool
    lean: bool = False
    swizzle: int = _SWIZZLE
    dynamic: bool = False
    persistent: bool = True
    split_k: int = 1
    processors: int = 0

    def __str__(self) -> str:
        parts = [
            f"{self.tile_m}x{self.tile_n}",
            f"{self.cluster_m}x{self.cluster_n}",
            "pp" if self.pingpong else "co",
        ]
        parts += ["lean"] * self.lean
        parts += [f"sw{self.swizzle}"] * (self.swizzle != _SWIZZLE)
        parts += ["dyn"] * self.dynamic + ["np"] * (not self.persistent)
        parts += [f"k{self.split_k}"] * (self.split_k != 1)
        parts += [f"p{self.processors}"] * (self.processors != 0)
        return ":".join(parts)

    @staticmethod
    def parse(text: str) -> Config:
        """Inverse of ``str``: each config has one text.

        Raises:
            KernelError: if ``text`` is not of the form "128x192:2x1:pp", perhaps followed by
                ":lean", ":sw4", ":dyn" or ":np", ":k2" and ":p120", in this order.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise KernelError(
                f"{text!r} is not a kernel config: write it like '128x192:2x1:pp', perhaps "
                "followed by ':lean', ':sw4', ':dyn' or ':np', ':k2', ':p120', in this order"
            )
        tile_m, tile_n, cluster_m, cluster_n = map(int, match.groups()[:4])
        config = Config(
            tile_m,
            tile_n,
            cluster_m,
            cluster_n,
            pingpong=match[5] == "pp",
            lean=match[6] is not None,
            swizzle=int(match[7] or _SWIZZLE),
            dynamic=match[8] == ":dyn",
            persistent=match[8] != ":np",
            split_k=int(match[9] or 1),
            processors=int(match[10] or 0),
        )
        if str(config) != text:
            raise KernelError(f"{text!r} is not how this kernel config is written: {config}")
        return config

    def cta_tile_m(self, arch: int) -> int:
        """Rows of the output that one CTA owns, and so that one column partial covers. Data-centre
        Blackwell splits the tile over the two CTAs of a pair."""
        two_ctas = arch in (10, 11) and self.cluster_m % 2 == 0 and self.tile_m in (128, 256)
        return self.tile_m // 2 if two_ctas else self.tile_m


#: The candidates on Hopper (compute capability 9).
HOPPER = tuple(
    Config.parse(text)
    for text in (
        *("128x192:2x1:pp", "128x160:2x1:pp", "128x128:2x1:pp", "128x208:2x1:pp"),
        *("192x128:2x1:pp", "128x192:1x2:pp", "128x160:1x2:pp", "128x128:1x2:pp"),
        *("128x256:2x1:co", "256x128:2x1:co", "256x192:2x1:co", "256x208:2x1:co"),
        *("256x160:2x1:co", "256x192:1x2:co", "256x128:1x2:co", "128x256:1x2:co"),
    )
)
#: More of them, for programs that load tiles, all of their tiles being 16-bit.
HOPPER_LEAN = tuple(
    Config.parse(f"{text}:lean")
    for text in (
        *("128x192:2x1:pp", "128x160:2x1:pp", "128x128:2x1:pp", "128x192:1x2:pp"),
        *("128x128:1x2:pp", "128x128:2x2:pp", "128x192:2x2:pp", "128x256:2x1:co"),
        *("256x128:2x1:co", "128x256:1x2:co", "256x128:1x2:co", "256x192:2x1:co"),
    )
)
#: The one config elsewhere, until someone measures: (data-centre, consumer) Blackwell.
_BLACKWELL = Config.parse("256x256:2x1:co")
_BLACKWELL_CONSUMER = Config.parse("128x128:1x1:pp")

_TILE_K = 64


def split_columns(config: Config) -> bool:
    """Do two warpgroups share the columns of a tile on Hopper, as many rows cannot be halved?"""
    return config.tile_m == 320 or (config.tile_m == 192 and config.tile_n > 128)


def unwritten(config: Config, b_major: str = "n") -> str | None:
    """Why QuACK has no kernel with this tile and schedule on Hopper, or None.

    ``b_major``: "k", or "n", with which fewer are legal.
    """
    m, n = config.tile_m, config.tile_n
    if config.cluster_m * config.cluster_n > 4:
        return "a cluster has at most 4 CTAs"
    if config.dynamic and not config.persistent:
        return "only a persistent kernel has a scheduler"
    if config.pingpong:
        widest, step = {64: 256, 128: 208, 192: 128}.get(m, 0), 16
        if not config.persistent:
            return "a ping-pong kernel is persistent"
    else:
        widest = {64: 256, 128: 256, 192: 256, 256: 208, 320: 160}.get(m, 0)
        step = 32 if m in (192, 320) else 16
    if not 0 < n <= widest or n % step:
        return f"{m} rows go with multiples of {step} up to {widest} columns"
    if split_columns(config) and b_major != "k":
        # Each has every other eight columns: no descriptor of N-major shared memory says that, and
        # CuTeDSL ends the process.
        return f"{m}x{n} tiles need a K-major B"
    return None


def epilogue_tile(config: Config) -> tuple[int, int]:
    """(rows, columns) of the tiles that Hopper's epilogue moves through shared memory at a time."""
    columns = 16 if config.lean else math.gcd(32, config.tile_n)
    if config.pingpong or split_columns(config):
        return 64, columns  # one warpgroup's rows: beside another, not on top of it
    return (192 if config.tile_m == 192 else min(config.tile_m, 128)), columns


def mainloop_stages(program: EpilogueProgram, config: Config) -> int:
    """How many K steps of A and B fit into Hopper's shared memory beside the epilogue's buffers
    (four stages of each tile load, two of each tile store, four if they are narrow, vectors once;
    lean ones have two stages of everything)."""
    rows, columns = epilogue_tile(config)
    tiles = config.tile_m * config.tile_n // (rows * columns)
    load_stages = 2 if config.lean else min(tiles, 4)
    store_stages = 2 if config.lean else min(tiles, 4 if columns <= 16 else 2)
    stored = sum(WIDTHS[s.dtype] for s in program.stores) / (2 if program.paired else 1)
    loaded = sum(WIDTHS[o.dtype] for o in program.operands if o.kind == "tile")
    tile_bytes = rows * columns * (store_stages * stored + load_stages * loaded)
    vectors = sum(
        WIDTHS[o.dtype] * (config.tile_n if o.kind == "row" else config.tile_m)
        for o in program.operands
        if o.kind in ("row", "col")
    )
    # Where several warps share a row or a column, their sums meet in shared memory.
    for reduce in program.reduces:
        if reduce.axis == "col":
            vectors += 4 * config.tile_n * (rows // 16 - 1)
        elif split_columns(config):
            vectors += 4 * config.tile_m * (2 if reduce.combine == "logsumexp" else 1)
    step_bytes = (config.tile_m + config.tile_n) * _TILE_K * WIDTHS[program.in_dtype]
    return int((H100.smem_bytes - 2048 - tile_bytes - vectors) // step_bytes)


def legal_configs(program: EpilogueProgram, arch: int = 9) -> tuple[Config, ...]:
    """Configs that compile for ``program`` on compute capability ``arch``.x; may be empty."""
    if arch in (10, 11):
        return (_BLACKWELL,)
    if arch == 12:
        return (_BLACKWELL_CONSUMER,)
    loaded = [o.dtype for o in program.operands if o.kind == "tile"]
    narrow = all(WIDTHS[dtype] == 2 for dtype in (*loaded, *(s.dtype for s in program.stores)))
    candidates = HOPPER + HOPPER_LEAN if loaded and narrow else HOPPER
    configs = [c for c in candidates if mainloop_stages(program, c) >= 2]
    if program.paired:
        configs = [c for c in configs if c.tile_n % 32 == 0 and c.tile_m != 192]
    # Two stages are too few: a load takes longer than the multiplication before it.
    return tuple([c for c in configs if mainloop_stages(program, c) >= 3] or configs)
