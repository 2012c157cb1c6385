# SPDX-License-Identifier: Apache-2.0
"""What an epilogue costs beyond its tiles' traffic: the multiplications that it is worth, and the
instructions that it is made of.

A kernel's epilogue is unrolled over all accumulators of a thread. Where the code no longer fits
into the instruction cache, the same program takes up to seven times as long: on one H100, tiles of
128 x 192 took 1555 us where 128 x 128 took 351 (docs/gotchas.md). All figures are from there.
"""

from __future__ import annotations

import functools

from coda_inductor.program import EpilogueProgram
from coda_inductor.select.config import Config
from coda_inductor.select.device import Gpu

#: Op -> (multiplications that it takes as long as, instructions), where it is not one of each.
_OPS = {
    **dict.fromkeys(("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "reciprocal"), (7.0, 3)),
    "div": (8.0, 6),
    **dict.fromkeys(("tanh", "sigmoid"), (15.0, 7)),
    **dict.fromkeys(("log1p", "expm1"), (22.0, 12)),
    "erf": (25.0, 25),
    **dict.fromkeys(("round_float8_e4m3fn", "round_float8_e5m2"), (4.0, 4)),
    **dict.fromkeys(("sin", "cos"), (250.0, 100)),  # full range reduction
    "swap": (0.0, 0),
}
_ONE = (1.0, 1)
_OPERANDS = {"tile": (2.0, 2.0), "row": (2.5, 1.5), "col": (1.5, 0.5), "scalar": (0.0, 0.0)}
#: Not measured: a table is loaded as a tile is. A swap names other registers.
_OPERANDS["table"] = _OPERANDS["tile"]
_STORE = (2.0, 1.5)
_SUMS = {"row": (3.0, 2.0), "col": (6.0, 5.0)}
_LOG_SUM_EXP = (12.0, 8.0)


@functools.lru_cache(maxsize=4096)
def weight(program: EpilogueProgram) -> tuple[float, float]:
    """(multiplications, instructions) that ``program``'s work is worth for one element."""
    parts: list[tuple[float, float]] = [_OPS.get(step.op, _ONE) for step in program.steps]
    parts += [_OPERANDS[operand.kind] for operand in program.operands]
    parts += [_STORE] * len(program.stores)
    parts += [
        _LOG_SUM_EXP if reduce.combine == "logsumexp" else _SUMS[reduce.axis]
        for reduce in program.reduces
    ]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def extra_us(
    program: EpilogueProgram, like: EpilogueProgram, config: Config, elements: float, gpu: Gpu
) -> float:
    """What ``program`` costs more on ``gpu`` than ``like`` with the same config, on so many
    accumulator elements: never less than nothing."""
    shows = (gpu.op_shows_lean if config.lean else gpu.op_shows) if config.pingpong else 1.0
    work = (weight(program)[0] - weight(like)[0]) * shows
    misses = _misses(program, config, gpu) - _misses(like, config, gpu)
    return (max(work, 0.0) * gpu.op_us + max(misses, 0.0)) * elements / 1e6


def _misses(program: EpilogueProgram, config: Config, gpu: Gpu) -> float:
    """Microseconds for a million elements that a thread waits for its instructions."""
    groups = 1 if config.pingpong else 2
    each = config.tile_m * config.tile_n / (128 * groups)
    beyond = max(each * weight(program)[1] - gpu.cached_instructions, 0.0)
    return min(beyond * gpu.miss_us, gpu.misses_us)
