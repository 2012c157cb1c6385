# SPDX-License-Identifier: Apache-2.0
"""Kernel configs: what they are, which are legal for a program, and which one to use."""

from __future__ import annotations

import re
from dataclasses import dataclass

from coda_inductor.errors import KernelError
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.select.device import H100

_TEXT = re.compile(r"(\d+)x(\d+):(\d+)x(\d+):(pp|co)(:lean)?")


@dataclass(frozen=True)
class Config:
    """A CTA tile (rows x columns of the output), a cluster of CTAs that share loads, the schedule:
    ping-pong (two consumer warpgroups on two tiles) or cooperative (on one tile), and whether the
    epilogue's buffers are small in favour of the main loop's (``kernels.lean``)."""

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool
    lean: bool = False

    def __str__(self) -> str:
        schedule = "pp" if self.pingpong else "co"
        lean = ":lean" if self.lean else ""
        return f"{self.tile_m}x{self.tile_n}:{self.cluster_m}x{self.cluster_n}:{schedule}{lean}"

    @staticmethod
    def parse(text: str) -> Config:
        """Inverse of ``str``.

        Raises:
            KernelError: if ``text`` is not of the form "128x192:2x1:pp" or "128x192:2x1:pp:lean".
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise KernelError(f"{text!r} is not a kernel config: write it like '128x192:2x1:pp'")
        tile_m, tile_n, cluster_m, cluster_n = map(int, match.groups()[:4])
        pingpong, lean = match[5] == "pp", match[6] is not None
        return Config(tile_m, tile_n, cluster_m, cluster_n, pingpong, lean)

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


def mainloop_stages(program: EpilogueProgram, config: Config) -> int:
    """How many K steps of A and B fit into Hopper's shared memory beside the epilogue's buffers
    (four stages of each tile load, two of each tile store, vectors once; lean ones are half as wide
    and have two stages of everything)."""
    rows = 64 if config.pingpong else 128
    columns, load_stages = (16, 2) if config.lean else (32, 4)
    stored = sum(WIDTHS[s.dtype] for s in program.stores) / (2 if program.paired else 1)
    loaded = sum(WIDTHS[o.dtype] for o in program.operands if o.kind == "tile")
    tile_bytes = rows * columns * (2 * stored + load_stages * loaded)
    vectors = sum(
        WIDTHS[o.dtype] * (config.tile_n if o.kind == "row" else config.tile_m)
        for o in program.operands
        if o.kind in ("row", "col")
    )
    # Reductions over M meet in shared memory, one vector a warp.
    vectors += sum(4 * 8 * config.tile_n for r in program.reduces if r.axis == "col")
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
