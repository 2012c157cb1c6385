# SPDX-License-Identifier: Apache-2.0
"""The measurements of one site, and the decisions that they allow."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.select.site import Site

#: Two times of one run that are closer than this count as equal, whatever their spread.
_EQUAL = 0.005
#: Times of one config differ by this much from run to run, with any spread. Configs that are closer
#: count as equal, or two runs would choose differently. That costs 0.2 % (gotchas.md).
_RUN_NOISE = 0.015
#: The most noise that counts: beyond it the machine is busy, and not everything is equal.
_NOISE = 0.03


@dataclass(frozen=True)
class Figures:
    """Median times of a program on one GPU model, at about ``m`` rows, with a cold L2 cache.

    Attributes:
        us: microseconds of a kernel, by its config.
        unfused: microseconds of cuBLAS and the kernels that Inductor compiles around it.
        plain: microseconds of cuBLAS alone.
        spread: relative error of a typical median.
        failed: the reason if a config has no time: it does not compile, is wrong, crashes or hangs.
        m: the number of rows in the measurement.
        name: the name of a measured site, for readers.
        like: the :func:`signature` of its program.
    """

    us: Mapping[str, float]
    unfused: float
    plain: float
    spread: float = 0.0
    failed: Mapping[str, str] = field(default_factory=dict)
    m: int = 0
    name: str = ""
    like: str = ""

    @property
    def tolerance(self) -> float:
        """The relative difference from which one of two times counts as longer."""
        return max(_EQUAL, min(self.spread, _NOISE))

    def best(self, order: Iterable[str]) -> str | None:
        """The first config of ``order`` that no other config beats clearly, so that noise does not
        change the choice between equal ones. None if none was measured."""
        times = {name: self.us[name] for name in order if name in self.us}
        if not times:
            return None
        limit = min(times.values()) * (1 + max(self.tolerance, _RUN_NOISE))
        return next(name for name, us in times.items() if us <= limit)


def rows_class(m: int) -> int:
    """The number of rows whose measurement is used for ``m``: powers of two up to 128, multiples of
    128 up to 8192, then of 256, 512 and so on. A class differs by less than a wave of tiles."""
    if m <= 128:
        return max(16, 1 << (m - 1).bit_length())
    step = 128 << max(0, math.ceil(math.log2(m / 8192)))
    return -(-m // step) * step


def key_of(site: Site) -> str:
    """The key of a measurement: program, size and layout of ``site``."""
    terms = f" terms={site.terms}" if site.terms > 1 else ""
    copied = f" copied={'+'.join(map(str, site.copied))}" if site.copied else ""
    layout = f"{site.a_major}{site.b_major}"
    groups = f" groups={site.groups}" if site.groups else ""
    groups += f" of={max(1, round(site.m / site.rows))}" if site.rows else ""
    size = f"{rows_class(site.m)}x{site.n}x{site.k}"
    return f"{site.program.key} {size} {layout}{terms}{copied}{groups}"


def signature(program: EpilogueProgram) -> str:
    """Equal for programs that take about the same time: products, bytes of tiles loaded and stored
    per element, reductions, heads. Releases of torch spell one gradient in several ways."""
    loads = sum(WIDTHS[o.dtype] for o in program.loads)
    stores = sum(WIDTHS[s.dtype] for s in program.stores)
    reduces = {f"{reduce.axis}-{reduce.combine}" for reduce in program.reduces}
    if "row-logsumexp" in reduces:  # a head: what else its rows have, or do not store, is little
        reduces = {name for name in reduces if name.startswith("col")} | {"row-logsumexp"}
        stores = stores or WIDTHS[program.product_dtype]
    dtypes = dict.fromkeys((program.a_dtype, program.b_dtype))
    parts = [str(len(program.accs)), *dtypes, *["fast"] * program.fast, f"{loads}+{stores}"]
    parts += sorted(reduces)
    parts += ["grouped"] * program.grouped + ["gathered"] * (program.routes[1] is not None)
    return " ".join(parts + ["heads"] * bool(program.head))


def to_row(key: str, figures: Figures) -> dict[str, Any]:
    """The row of a file for these measurements. Inverse: :func:`from_row`."""
    return {"key": key} | {name: x for name, x in vars(figures).items() if name != "failed" or x}


def from_row(row: Mapping[str, Any]) -> tuple[str, Figures]:
    """(key, figures) of a row. Raises AttributeError, KeyError, TypeError or ValueError."""
    figures = Figures(**{name: x for name, x in row.items() if name != "key"})
    if not all(0 < x < math.inf for x in (*figures.us.values(), figures.unfused, figures.plain)):
        raise ValueError("times must be positive numbers")
    return str(row["key"]), figures
