# SPDX-License-Identifier: Apache-2.0
"""What a kernel is expected to cost, from the measurements shipped for a GPU model and constants
fitted to them. ``gpu`` is the one that is asked about, everywhere; of one without a table nothing
is known, and every kernel's time is infinite.

A persistent GEMM runs in waves: with T tiles on S processors, the last of ceil(T / S) waves is as
expensive as a full one. A wave costs ``step * K + tile + per_byte * (bytes moved per element)``,
the whole ``fixed`` more: four constants a config, fitted to the measurements by
``benchmarks/sweep.py`` and shipped with them. Where the same (N, K) was measured, the model is
scaled by measured / modelled there, so that measured shapes give measured times.

cuBLAS has configs of its own that we cannot see: it is expected to be as good as our best config
is without an epilogue (times a fitted ratio), or better where the GEMM is small (a fitted line in
the number of multiplications; large ones run at lower clocks than it says).

A GEMM that is the sum of several products (``terms``) has the sum of their K's as its K, in every
signature here and in the table.

No table has GEMMs of FP8. What they take is known as a part of what the same one takes in
bfloat16 (``FP8_CUBLAS``, ``FP8_KERNEL``); everything around it takes as long as in bfloat16.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coda_inductor.graph.sizes import hint
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.program.scales import scaled
from coda_inductor.report import GROUNDS
from coda_inductor.select.config import Config, legal_configs
from coda_inductor.select.device import H100, Gpu
from coda_inductor.select.instructions import extra_us
from coda_inductor.select.kinds import TERMS, family, kinds

_PLAIN_BYTES = 2.0  # one 16-bit store an element
#: Thousand million multiplications up to which a GEMM counts as small.
SMALL_GMACS = 40.0
#: What a processor of a generation that nobody has measured does in a microsecond, about: it says
#: whether the host is the limit, and nothing else.
_FLOPS_PER_US = {8: 2.3e6, 10: 1e7, 11: 1e7, 12: 2.4e6}
#: (Is accumulation fast, is there a scale for each row and column?) -> the part of cuBLAS's time in
#: bfloat16 that its FP8 GEMM takes, scales included. One H200, M=8192, four (N, K) of Llamas,
#: 2026-11: 0.56 to 0.57, 0.58 to 0.61; fast 0.52 to 0.56, 0.51 to 0.54.
FP8_CUBLAS = {
    (False, False): 0.565, (False, True): 0.59, (True, False): 0.535, (True, True): 0.525,
}  # fmt: skip
#: The same of ours with its best config, 128x128 cooperative: 0.56 to 0.58.
FP8_KERNEL = 0.57
#: Where :func:`ground` is no measurement and no model fitted to the like: what people are told.
UNSURE = {
    name: GROUNDS[name]
    for name in ("halved", "smaller", "larger", "borrowed", "unlike", "turned", "unknown")
}


def table(gpu: Gpu = H100) -> dict:
    """The shipped data: "processors", "models" ({family: {config: constants}}), "cublas" and
    "shapes" (the measurements)."""
    return _table(gpu.table)


@functools.lru_cache(maxsize=8)
def _table(path: Path | None) -> dict:
    data: dict[str, Any] = {"processors": 1, "models": {}, "shapes": []}
    if path is not None:
        data = json.loads(path.read_text())
    data["kernels"], data["products"], data["configs"] = {}, {}, {}
    for row in data["shapes"]:
        kind, n, k = row["kind"], row["n"], row["k"]
        data["configs"].setdefault(kind, set()).update(row["us"])
        data["kernels"].setdefault((kind, n, k), []).append(row)
        data["products"].setdefault((n, k // TERMS[kind]), []).append(row)
    return data


def traffic(program: EpilogueProgram, n: int) -> float:
    """Bytes of tile loads and stores for each accumulator element, of ``n`` columns."""
    loads = sum(WIDTHS[o.dtype] for o in program.operands if o.kind == "tile")
    stores = sum(WIDTHS[s.dtype] for s in program.stores)
    return (loads + stores) / (2 if program.paired else 1) + table_traffic(program, n)


def table_traffic(program: EpilogueProgram, n: int) -> float:
    """Bytes of tables for each accumulator element: each is read from memory once for all heads."""
    return sum(WIDTHS[o.dtype] for o in program.operands if o.kind == "table") * program.head / n


def kind_of(program: EpilogueProgram, terms: int = 1, measured: Collection[str] = ()) -> str:
    """The kind that is nearest to ``program``, if not empty of those in ``measured``: of its
    family, with heads or without, of one product or several, then by the bytes loaded and stored
    and the reductions."""
    related = [name for name, p in kinds().items() if family(p) == family(program)]
    related = [name for name in related if not measured or name in measured] or related
    headed = [name for name in related if bool(kinds()[name].head) == bool(program.head)]
    related = headed or related
    alike = [name for name in related if (TERMS[name] > 1) == (terms > 1)] or related
    mine = _traits(program)

    def distance(name: str) -> float:
        return sum(abs(x - y) for x, y in zip(mine, _traits(kinds()[name]), strict=True))

    return min(alike, key=distance)


def same_kind(program: EpilogueProgram, terms: int = 1) -> str:
    """The measured kind that moves as many bytes as ``program`` and reduces alike, or ""."""
    kind = kind_of(program, terms)
    alike = _traits(program) == _traits(kinds()[kind]) and (TERMS[kind] > 1) == (terms > 1)
    return kind if alike and program.a_dtype == kinds()[kind].a_dtype else ""


def _traits(program: EpilogueProgram) -> tuple[int, ...]:
    """Bytes loaded and stored an element; a reduction over M, the dearer one, counts as a tile."""
    axes = {reduce.axis for reduce in program.reduces}
    loads = sum(WIDTHS[o.dtype] for o in program.loads)
    stores = sum(WIDTHS[s.dtype] for s in program.stores)
    return loads, stores, 2 * ("col" in axes), int("row" in axes)


def kernel_us(
    program: EpilogueProgram, config: Config, m, n: int, k: int, terms: int = 1, gpu: Gpu = H100
) -> float:
    """Expected microseconds of ``program`` with ``config``; N is one weight's for pairs."""
    kind, rows = kind_of(program, terms, table(gpu)["configs"]), hint(m)
    if program.fp8:
        return _fp8_us(program, rows, n, k, gpu)
    elements = rows * n * table(gpu)["processors"] / gpu.processors
    extra = extra_us(program, kinds()[kind], config, elements, gpu)
    return _kernel_us(gpu, kind, str(config), rows, n, k, traffic(program, n)) + extra


def ground(
    program: EpilogueProgram | None,
    config: Config | None,
    m,
    n: int,
    k: int,
    terms: int = 1,
    gpu: Gpu = H100,
    a_major: str = "k",
) -> str:
    """What :func:`kernel_us` (without program and config: :func:`cublas_us`) rests on:

    "measured"  a program of this kind, with this (N, K), config and about this M
    "modelled"  the model, whose measurements had such sizes, within a factor of two
    "larger"    the model; nothing as large was measured, and it goes on linearly
    "smaller"   nothing: a few tiles on an idle GPU take what starting and ending a kernel takes.
                The model's constant for that is what is left over at thousands of tiles, so that
                for pairs it is 0, and N counts for nothing below one wave
    "unlike"    a guess: the model of programs without heads, for one that knows them
    "turned"    a guess: the model of left operands with rows in memory, for one with columns there
    "borrowed"  the model of another GPU of its generation
    "unknown"   nothing: no GPU of its generation was measured
    """
    if gpu.table is None:
        return "unknown"
    if program is not None and program.fp8:
        return "halved"
    known = table(gpu)
    if program is None or config is None:
        rows, every = known["products"].get((n, k), ()), known["shapes"]
    else:
        kind = kind_of(program, terms, known["configs"])
        if program.head and not kinds()[kind].head:
            return "unlike"
        if a_major == "m":
            return "turned"
        rows = known["kernels"].get((kind, n, k), ())
        group = family(program)
        every = [row for row in known["shapes"] if family(kinds()[row["kind"]]) == group]
    if gpu.borrowed:
        return "borrowed"
    if _nearest(rows, hint(m), "cublas" if config is None else str(config)) is not None:
        return "measured"
    sizes = {"m": hint(m), "n": n, "k": k}
    if any(2 * size < min(row[key] for row in every) for key, size in sizes.items()):
        return "smaller"
    if any(size > 2 * max(row[key] for row in every) for key, size in sizes.items()):
        return "larger"
    return "modelled"


def cublas_us(m, n: int, k: int, gpu: Gpu = H100) -> float:
    """Expected microseconds of one plain 16-bit matrix product (m, k) x (k, n) through cuBLAS."""
    return _cublas_us(gpu, hint(m), n, k)


def product_us(program: EpilogueProgram, m, n: int, k: int, gpu: Gpu = H100) -> float:
    """Expected microseconds of one product of ``program`` through cuBLAS, with its scales."""
    vectors = any(found.col or found.row for found in scaled(program).values())
    part = FP8_CUBLAS[program.fast, vectors] if program.fp8 else 1.0
    return part * cublas_us(m, n, k, gpu)


@functools.lru_cache(maxsize=4096)
def _fp8_us(program: EpilogueProgram, m: int, n: int, k: int, gpu: Gpu) -> float:
    """Of the program with its best config, whichever that is: what the epilogue adds in bfloat16,
    it adds here. No less than the products by themselves: of small ones the model knows little."""
    half = replace(program, a_dtype="bfloat16", b_dtype="bfloat16", fast=False)
    times = [kernel_us(half, c, m, n, k, 1, gpu) for c in legal_configs(half, gpu.arch)]
    products = len(program.accs) * cublas_us(m, n, k, gpu)
    least = min(times, default=math.inf) - (1 - FP8_KERNEL) * products
    return max(least, FP8_KERNEL * products)


@functools.lru_cache(maxsize=4096)
def _kernel_us(gpu: Gpu, kind: str, config: str, m: int, n: int, k: int, moved: float) -> float:
    group, known = family(kinds()[kind]), table(gpu)
    # What it costs to spill registers, say, is not known from another kind of the family.
    if config not in known["configs"].get(kind, ()) or config not in known["models"].get(group, ()):
        return math.inf  # a candidate that was never measured
    expected = modelled(known, group, config, m, n, k, moved, gpu.processors)
    row = _nearest(known["kernels"].get((kind, n, k), ()), m, config)
    if row is None:
        return expected
    there = traffic(kinds()[kind], n)
    return expected * row["us"][config] / modelled(known, group, config, row["m"], n, k, there)


@functools.lru_cache(maxsize=4096)
def _cublas_us(gpu: Gpu, m: int, n: int, k: int) -> float:
    if gpu.table is None:
        return 2 * m * n * k / (gpu.processors * _FLOPS_PER_US.get(gpu.arch, 4e6))
    known = table(gpu)
    expected = modelled_cublas(known, m, n, k, gpu.processors)
    row = _nearest(known["products"].get((n, k), ()), m, "cublas")
    if row is None:
        return expected
    return expected * row["us"]["cublas"] / modelled_cublas(known, row["m"], n, k)


def modelled(data, group, config, m, n, k, moved, processors=None) -> float:
    """The model alone, without the measurements. ``processors`` None: the measured device's."""
    step, tile, per_byte, fixed = data["models"][group][config]
    passes = waves(group, config, m, n, processors or data["processors"])
    return passes * (step * k + tile + per_byte * moved) + fixed


def modelled_cublas(data, m, n, k, processors=None) -> float:
    """As :func:`modelled`, for cuBLAS."""
    processors = processors or data["processors"]
    best = min(
        modelled(data, "single", config, m, n, k, _PLAIN_BYTES, processors)
        for config in data["models"]["single"]
        if not Config.parse(config).lean
    )
    gmacs = m * n * k / 1e9
    if gmacs > SMALL_GMACS:
        return data["cublas"]["ratio"] * best
    small = data["cublas"]["fixed"] + data["cublas"]["us_per_gmac"] * gmacs
    return min(data["cublas"]["ratio"] * best, small * data["processors"] / processors)


def waves(group: str, config: str, m: int, n: int, processors: int) -> int:
    """How many tiles the busiest cluster works through. N is one weight's for pairs."""
    columns = 2 * n if group == "paired" else n
    c = Config.parse(config)
    clusters = -(-m // (c.tile_m * c.cluster_m)) * -(-columns // (c.tile_n * c.cluster_n))
    return -(-clusters // (processors // (c.cluster_m * c.cluster_n)))


def _nearest(rows: Sequence[dict], m: int, config: str) -> dict | None:
    """The measurement of ``config`` whose M is nearest, within a factor of two."""
    near = [r for r in rows if config in r["us"] and r["m"] / 2 <= m <= r["m"] * 2]
    return min(near, key=lambda r: abs(r["m"] - m), default=None)
