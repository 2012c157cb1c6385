# SPDX-License-Identifier: Apache-2.0
"""Expected time of a site without a measurement: multiplications at the rate of cuBLAS's large
products, bytes at the rate of Inductor's elementwise kernels, and a start time.

A fused kernel multiplies as fast as cuBLAS, except for the processors that its tiles leave idle.
Its stores and the epilogue's arithmetic overlap with the next tile's multiplications, unless they
take longer; its tile loads do not. It also takes at least the time to read its operands, with as
many processors as it has tiles. With few tiles cuBLAS splits K (an adapter of rank 16: 65 us for 29
us in cuBLAS, 8192 x 4096, an H100).

This is rough, so a kernel must win by ``MARGIN``. Of 825 measured sites with a known program (H100
and H200, 16 bits and FP8), 612 win by more than 3 %: 570 of them would be fused; 67 lose by more
than 3 %: 34 of them would be refused. These choices take 0.9 % longer than the best ones; fusing
all takes 1.0 % longer, fusing none 11 % (2026-11). What it avoids are the worst: it fuses 11 rows
that lose more than 10 %, at most 39 %, where fusing all fuses 27, which lose up to 55 %, and
adapters of rank 16 at more than twice their time.
"""

import math

from coda_inductor.gpu import Gpu
from coda_inductor.graph.sizes import hint
from coda_inductor.program import EpilogueProgram
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.program.ir import OF_ROWS
from coda_inductor.program.scales import scaled
from coda_inductor.program.statistics import ROUNDING
from coda_inductor.select.site import Site

#: Safety factor on a kernel's expected time.
MARGIN = 1.02
#: Microseconds that every product takes in addition to its multiplications.
START_US = 6.0
#: The share of the idle time at the end that counts, because cuBLAS has more tile sizes.
IDLE = 0.2
#: Instructions of an epilogue, one for each element of the output, that a processor issues in a
#: microsecond, of GELU and its gradient in ViT-L, 12608 x 4096 x 1024 on an H200: 209 and 295 us,
#: where the multiplications take 142 (`h200_vit_kernels.json`).
EPILOGUE_RATE = 55e3
#: Instructions of a step that are not one (``mainloop.math``).
INSTRUCTIONS = {
    "sin": 30, "cos": 30, "erf": 22, "log1p": 22, "expm1": 22, "tanh": 12, "sigmoid": 10, "div": 8,
    "exp": 5, "log": 5, "sqrt": 5, "rsqrt": 4, "exp2": 4, "log2": 4, "reciprocal": 4,
    "neg": 0, "abs": 0,
}  # fmt: skip
#: Cost of a swap of columns, as bytes per element: 3.6 to 5.5 on an H200 for 1B, 8B and 70B widths
#: (rules.md), so it is no gain unless a measurement shows one.
SWAP_BYTES = 6
#: Cost of each sum in an epilogue beyond two, as bytes per element. The gradient of a LayerNorm has
#: four: 34 and 67 us over cuBLAS in ViT-L, 12608 x 1024, whose loads take 6 and 12.
FURTHER_SUM_BYTES = 5
#: Speedup of cuBLAS's products in FP8 over 16 bits, scales included.
FP8_RATE = 1.75
#: Time of torch's products of experts relative to ours: 1.05 to 1.31 on an H100, for the shapes of
#: OLMoE, Qwen3 and Mixtral (``mainloop.readings.grouped``).
GROUPED = 1.05


def product_us(m, n: int, k: int, gpu: Gpu, *, fp8: bool = False) -> float:
    """Expected microseconds of one product (m, k) x (k, n) in cuBLAS."""
    return START_US + max(_multiply_us(hint(m), n, k, gpu, fp8), _read_us(m, n, k, gpu, fp8))


def fused_us(site: Site, gpu: Gpu) -> float:
    """Expected microseconds of ``site`` as one kernel, with its copies at every call."""
    program, n = site.program, site.n
    elements = hint(site.m) * n
    loads = sum(WIDTHS[o.dtype] for o in program.operands if o.kind == "tile")
    stores = sum(WIDTHS[s.dtype] for s in program.stores)
    math_us = len(program.accs) * _multiply_us(hint(site.m), n, site.k, gpu, program.fp8)
    tiles = max(1, math.ceil(hint(site.m) / 128) * math.ceil(n * len(program.accs) / 192))
    math_us *= 1 + IDLE * (-tiles % gpu.processors / tiles)  # idle processors in the last wave
    read_us = _read_us(site.m, n * len(program.accs), site.k, gpu, program.fp8)
    read_us *= max(1.0, gpu.processors / tiles)
    instructions = elements * sum(INSTRUCTIONS.get(step.op, 1) for step in program.steps)
    steps_us = instructions / (EPILOGUE_RATE * gpu.processors)
    us = START_US + max(math_us, elements * stores / gpu.bytes_per_us, read_us, steps_us)
    loads += SWAP_BYTES * bool(program.head)
    sums = sum(reduce.combine == "add" for reduce in program.reduces)
    loads += FURTHER_SUM_BYTES * max(0, sums - 2)
    us += elements * (loads + table_traffic(program, n)) / gpu.bytes_per_us
    if site.copied:  # read and written
        copied = n * sum(site.copied) * WIDTHS[program.b_dtype]
        us += 2 * copied / gpu.bytes_per_us + gpu.launch_us
    return us


def products_us(site: Site, gpu: Gpu) -> float:
    """Expected microseconds of all products of ``site``, each in cuBLAS."""
    program = site.program
    times = (product_us(site.m, site.n, k, gpu, fp8=program.fp8) for k in site.ks)
    return len(program.accs) * sum(times) * (GROUPED if program.grouped else 1.0)


def around_us(site: Site, gpu: Gpu) -> float:
    """Expected microseconds of the work around the products of ``site`` if it is not fused: one
    elementwise kernel that reads them and the tile operands and writes the stores, and a second one
    if there are reductions over M or log-sum-exps, which the rest of a row depends on."""
    program, terms = site.program, len(site.ks)
    names = {*program.accs, *(o.name for o in program.operands)}
    products = {scale.value for scale in scaled(program).values()}
    stores = [s for s in program.stores if s.value not in products]  # cuBLAS writes those
    if program.fp8 and not (stores or program.reduces):
        return 0.0  # its scales too
    traffic = float(sum(WIDTHS[s.dtype] for s in stores if s.name not in site.after))
    if site.after:
        traffic += _read(program, set(program.accs), terms)
        traffic -= sum(WIDTHS[s.dtype] for s in program.stores if s.name in site.after)
        launches = 0
    else:
        traffic += _read(program, names, terms) + table_traffic(program, site.n)
        launches = 1
    if program.routes[1] is not None or (program.grouped and site.terms > 1):
        traffic += 2 * site.k / site.n * WIDTHS[program.a_dtype]  # rows gathered, or concatenated
        launches += 1
    exact = {step.name: step.args[0] for step in program.steps if step.op in ROUNDING.values()}
    apart = [r for r in program.reduces if r.axis == "col" or r.combine in OF_ROWS]
    separate = {str(exact.get(reduce.value, reduce.value)) for reduce in apart}
    if separate:  # one pass for all of them, which reads what is stored anyway
        stored = {s.value: WIDTHS[s.dtype] for s in program.stores if s.value in separate}
        traffic += sum(stored.values())
        # A sum of products that an elementwise kernel reads as well is in memory, as one.
        others = program.sources([value for value in separate if value not in stored])
        traffic += _read(program, others, 1 if site.after else terms)
        launches += 1
    return hint(site.m) * site.n * traffic / gpu.bytes_per_us + launches * gpu.launch_us


def table_traffic(program: EpilogueProgram, n: int) -> float:
    """Bytes of tables per accumulator element: each table is read once for all heads."""
    return sum(WIDTHS[o.dtype] for o in program.operands if o.kind == "table") * program.head / n


def _read_us(m, n: int, k: int, gpu: Gpu, fp8: bool) -> float:
    return (hint(m) + n) * k * (1 if fp8 else 2) / gpu.bytes_per_us


def _multiply_us(m: int, n: int, k: int, gpu: Gpu, fp8: bool) -> float:
    return 2 * m * n * k / (gpu.flops_per_us * (FP8_RATE if fp8 else 1.0))


def _read(program: EpilogueProgram, names: set[str], terms: int) -> int:
    """Bytes per element that a kernel reads: the products, ``terms`` for each accumulator, and the
    tile operands among ``names``."""
    products = terms * len(names & set(program.accs)) * WIDTHS[program.product_dtype]
    tiles = [o for o in program.operands if o.kind == "tile" and o.name in names]
    return products + sum(WIDTHS[o.dtype] for o in tiles)
