# SPDX-License-Identifier: Apache-2.0
"""The reference executor: an epilogue program as plain torch ops, on any device and in any dtype.

It defines the meaning of programs: the oracle of the tests, the shape rule of the fake
implementation, and what runs if no kernel can (traced into the graph, so that Inductor compiles
it). FP8 operands are multiplied as exact values, and summed in float32. If the caller casts the
operands to float64, everything is computed in float64, whatever the program's dtypes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coda_inductor.compat import scaled_mm
from coda_inductor.program import OPS, EpilogueProgram, Store
from coda_inductor.program.dtypes import FP8, dtype_name
from coda_inductor.program.grouped import group_of, grouped_product
from coda_inductor.program.scales import scaled
from coda_inductor.program.statistics import ROUNDING


def logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """``torch.logsumexp`` of a floating tensor whose number of rows may be symbolic. Torch's own op
    checks whether there are rows, which is known only at run time for rows selected by a mask.
    Apart from the check, this function is its decomposition."""
    if all(isinstance(size, int) for size in x.shape):
        return torch.logsumexp(x, dim, keepdim)
    largest = x.amax(dim, keepdim=True)
    largest = torch.where(largest.abs() == math.inf, 0.0, largest)
    total = torch.log(torch.exp(x - largest).sum(dim, keepdim))
    return total + (largest if keepdim else largest.squeeze(dim))


def entropy(x: Tensor, lse: Tensor) -> Tensor:
    """The entropy in nats of the softmax of each row of ``x`` (..., V), whose log-sum-exps are
    ``lse`` (...). A probability of 0 adds 0, as in ``torch.distributions``, and not NaN."""
    logs = x - lse[..., None]
    p = torch.exp(logs)
    return -torch.where(p > 0, p * logs, 0.0).sum(-1)


def mixed_entropy(entropies: Tensor, tiles: Tensor, lse: Tensor) -> Tensor:
    """The entropy of each row, (M,), from the entropies and log-sum-exps of its tiles, (M, n_tiles)
    each, and its log-sum-exp, (M,): that of the choice of a tile, and the tiles' own, each as often
    as the tile is chosen."""
    logs = tiles - lse[:, None]
    p = torch.exp(logs)
    return torch.where(p > 0, p * (entropies - logs), 0.0).sum(-1)


def swap(x: Tensor, head: int, width: int, distance: int) -> Tensor:
    """``x`` (..., N), of heads with ``head`` columns each, with exchanged columns: among the first
    ``width`` of each head, those at ``distance`` from each other. Halves of a head have the
    distance width / 2, neighbors 1. A head's positions are x * even + swap(x) * odd: signs are in
    the tables (M, head), and both are 1/2 where a column keeps its value."""
    heads = x.unflatten(-1, (-1, head))
    swapped = heads[..., :width].unflatten(-1, (-1, 2, distance)).flip(-2).flatten(-3)
    return torch.cat((swapped, heads[..., width:]), -1).flatten(-2)


#: How the values of a tile are combined. So are the partials of all tiles, except entropies.
COMBINE: dict[str, Callable[..., Tensor]] = {
    "add": torch.sum,
    "max": torch.amax,
    "logsumexp": logsumexp,
    "entropy": lambda x, dim, **_: entropy(x, logsumexp(x, dim))[:, None],
}


#: Ops whose second argument may stay a number. As a tensor, Inductor would drop a sum with zero and
#: a product with one, and return one tensor for two outputs.
_TAKE_NUMBERS = ("add", "sub", "mul", "div")


def compute_dtype(program: EpilogueProgram) -> torch.dtype:
    """The dtype of values on the tile: float32, or float64 if the GEMM is float64."""
    return torch.float64 if program.a_dtype == "float64" else torch.float32


def run(
    program: EpilogueProgram, as_: Sequence[Tensor], bs: Sequence[Tensor],
    operands: Sequence[Tensor], *, exact: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Run ``program`` on ``as_``, each (M, K_j), and ``bs``, each (K_j, N).

    A single accumulator is the sum of all ``as_[j] @ bs[j]``. The two of a paired program are
    ``as_[0] @ bs[0]`` and ``as_[0] @ bs[1]``.

    In a grouped program, bs[j] is (E, K_j, N), or one tensor holds all of them, and ``as_[j]`` is
    (R, K_j) if its rows are gathered. ``operands`` follow ``program.operands``: tile (M, N), row
    (N,) or for a paired program (2N,), every value twice, for a grouped one (E, N) and (E, 2N), col
    (M,), scalar (), table (M, head), batch (B, N) or (B, 2N) as row. With ``exact`` the
    accumulators are not rounded, as in kernels. Without, each product is rounded first, as in an
    unfused graph: to the inputs' dtype, or for FP8, after its scales (``program.scales``), to
    bfloat16, the result dtype of FP8 GEMMs.

    Returns the stores, each (M, N), then the partials of the reductions over one tile that covers
    everything: (M, 1) for rows, (1, N) for columns, in the compute dtype.
    """
    wide = torch.float64 if as_[0].dtype == torch.float64 else compute_dtype(program)
    shape = program.rows(as_, operands), program.columns(bs)
    groups, index = (None if i is None else operands[i] for i in program.routes)
    env = _load(program, operands, groups, wide, shape)
    done: set[str] = set()
    if program.fp8:
        for acc, scale in scaled(program).items():
            b = bs[program.accs.index(acc)]
            if exact:
                env[acc] = fp8_product(as_[0], b, program.fast).to(wide)
            else:
                env[scale.value] = _round_fp8(program, scale, as_[0], b, env).to(wide)
                done.update(scale.steps)
    else:
        biases = {} if exact or len(as_) > 1 else _biases(program)
        for acc, (name, bias) in biases.items():
            term = env[bias].to(as_[0].dtype)
            env[name] = torch.addmm(term, as_[0], bs[program.accs.index(acc)]).to(wide)
            done.add(name)
        if len(biases) < len(program.accs):
            env.update(_products(program, as_, bs, (groups, index), wide, exact=exact))
    for step in program.steps:
        if step.name in done:
            continue
        if step.op == "swap":
            x, *numbers = step.args
            whole = _tile(_value(x, env, wide, as_[0].device), shape)
            env[step.name] = swap(whole, program.head, *map(int, numbers))
            continue
        args = [_value(arg, env, wide, as_[0].device) for arg in step.args]
        if step.op in _TAKE_NUMBERS and isinstance(step.args[1], float):
            args[1] = step.args[1]
        env[step.name] = OPS[step.op].torch(*args)
    outputs: list[Tensor] = []
    # Each store is a tensor of its own. The products of a grouped pair are parts of one.
    shared = {o.name for o in program.operands} | ({*program.accs} if program.grouped else set())
    # Inductor drops a cast down and up, so readers of a store would get unrounded values.
    roundings: dict[Any, str] = {(step.op, step.args[0]): step.name for step in program.steps}
    for store in program.stores:
        name = roundings.get((ROUNDING.get(store.dtype, ""), store.value), store.value)
        value = _tile(env[name].to(getattr(torch, store.dtype)), shape)
        form = torch.contiguous_format
        outputs.append(value.clone(memory_format=form) if name in shared else value.contiguous())
        shared.add(name)
    for reduce in program.reduces:
        value = _tile(env[reduce.value], shape)
        outputs.append(COMBINE[reduce.combine](value, reduce.dim, keepdim=True))
    return outputs


def _tile(value: Tensor, shape: tuple) -> Tensor:
    """``value`` on a whole (M, N) tile. A number of rows that it has is not read from a tensor: of
    a gradient it may be unknown until the backward pass, and no node of the forward pass."""
    rows: Any = value.shape[0] if value.dim() > 1 else 1
    repeated = isinstance(rows, int) and rows == 1
    return value.expand(shape[0] if repeated else -1, shape[1])


def _load(program, operands, groups, wide: torch.dtype, shape: tuple) -> dict[str, Tensor]:
    """The operands by name, in the compute dtype, in a form that broadcasts to an (M, N) tile."""
    env: dict[str, Tensor] = {}
    for operand, tensor in zip(program.operands, operands, strict=True):
        kind = operand.spec
        if kind.route:
            continue
        dims = kind.dims if groups is None else kind.grouped
        value = tensor.to(wide)
        if kind.columns and program.paired:
            value = value[..., ::2]
        if "H" in dims:
            value = value.repeat(1, shape[1] // program.head)
        if "B" in dims:
            part = shape[0] // value.shape[0]
            value = value[:, None].expand(-1, part, -1).flatten(0, 1)
        if "E" in dims:
            value = value[group_of(groups, shape[0])]
        env[operand.name] = value[:, None] if dims == "M" else value
    return env


def _biases(program: EpilogueProgram) -> dict[str, tuple[str, str]]:
    """For each accumulator whose only reader is a step that adds a bias: (that step, the bias).
    ``addmm`` rounds once where a product and a sum round twice. The step's origin tells them apart,
    for a bias of rows only in float32: in 16 bits a cast lies between the two, or once is better.
    """
    kinds = {o.name: o.kind for o in program.operands if o.dtype == program.a_dtype}
    read = {s.value for s in program.stores} | {r.value for r in program.reduces}
    biases = {}
    for acc in () if program.grouped else program.accs:
        readers = [step for step in program.steps if acc in step.args]
        bias = next((a for step in readers for a in step.names if a in kinds), "")
        row = program.a_dtype != "float32" and kinds.get(bias) == "row"
        one = row or any("addmm" in step.origin for step in readers)
        if one and bias and [step.op for step in readers] == ["add"] and acc not in read:
            biases[acc] = readers[0].name, bias
    return biases


def _products(program, as_, bs, routes, wide: torch.dtype, *, exact: bool) -> dict[str, Tensor]:
    """The accumulators, for operands of 16 bits and more."""
    groups, index = routes

    def product(a: Tensor, b: Tensor) -> Tensor:
        if groups is not None:
            return grouped_product(a, b, groups, index, wide if exact else a.dtype).to(wide)
        return accumulate(a, b, wide) if exact else (a @ b).to(wide)

    if groups is not None and len(bs) == 1:  # one weight, whose parts they are
        whole = product(torch.cat(tuple(as_), 1), bs[0])
        lanes = len(program.accs)
        parts = [whole[:, i::2] for i in (0, 1)] if program.alternating else whole.chunk(lanes, 1)
        return dict(zip(program.accs, parts, strict=True))
    if program.paired:
        return {name: product(as_[0], b) for name, b in zip(program.accs, bs, strict=True)}
    products = [product(a, b) for a, b in zip(as_, bs, strict=True)]
    return {program.accs[0]: functools.reduce(torch.add, products)}


def accumulate(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """``a @ b`` without rounding, as in accumulators: (M, K) times (K, N), in ``wide``."""
    if a.dtype == wide:
        return a @ b
    return torch.mm(a, b, out_dtype=wide) if a.is_cuda else a.to(wide) @ b.to(wide)


def fp8_product(
    a: Tensor, b: Tensor, fast: bool, scales: tuple[Tensor, Tensor] | None = None,
    rounded: str = "float32",
) -> Tensor:  # fmt: skip
    """The product ``a @ b`` of FP8 operands, (M, K) times (K, N), times ``scales``, (M, 1) and (1,
    N) or both 0-dim. It is float32, then ``rounded``, or float64 if ``a`` is.
    """
    out = getattr(torch, rounded)
    aligned = a.stride(1) == 1 and b.stride(0) == 1 and not (b.shape[0] % 16 or b.shape[1] % 16)
    readable = {dtype_name(a.dtype), dtype_name(b.dtype)} in ({FP8[0]}, {*FP8})
    if a.is_cuda and aligned and readable:
        unit = torch.ones((), device=a.device)
        return scaled_mm(a, b, *(scales or (unit, unit)), out_dtype=out, use_fast_accum=fast)
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    product = a.to(wide) @ b.to(wide)
    if scales is not None:
        product = product * scales[0] * scales[1]
    return product.to(out) if rounded != "float32" else product


def _round_fp8(program, scale, a: Tensor, b: Tensor, env: dict[str, Tensor]) -> Tensor:
    """A product rounded as in unfused graphs: after its scales. cuBLAS takes one scale per operand,
    or one per row and per column."""
    unit = torch.ones((), dtype=torch.float32, device=a.device)
    numbers = [env[name] for name in scale.scalars] + [unit, unit]
    scales = numbers[0], numbers[1]
    if scale.col is not None or scale.row is not None:
        col = env[scale.col] if scale.col is not None else numbers.pop(0)
        row = env[scale.row] if scale.row is not None else numbers.pop(0)
        m, n = a.shape[0], b.shape[1]
        scales = col.expand(m, 1).contiguous(), row.expand(1, n).contiguous()
    return fp8_product(a, b, program.fast, scales, program.product_dtype)


def _value(arg: str | float, env: dict[str, Tensor], wide: torch.dtype, device: torch.device):
    if isinstance(arg, str):
        return env[arg]
    # torch.maximum, torch.where and others take no Python scalars: 0-dim tensors work for all ops.
    return torch.full((), arg, dtype=wide, device=device)


def combined(program: EpilogueProgram, outputs: Sequence[Tensor]) -> list[Tensor]:
    """``outputs`` of one run, in which the partials of all tiles are one: (M, 1) or (1, N)."""
    found: list[Tensor] = []
    for output, x in zip(program.outputs, outputs, strict=True):
        if isinstance(output, Store):
            found.append(x)
        elif output.combine == "entropy":
            name = program.lse_of(output).name
            tiles = next(y for o, y in zip(program.outputs, outputs, strict=True) if o.name == name)
            found.append(mixed_entropy(x, tiles, logsumexp(tiles, 1))[:, None])
        else:
            found.append(COMBINE[output.combine](x, output.dim, keepdim=True))
    return found


def output_shapes(
    program: EpilogueProgram, m, n, tile_m: int | None = None, tile_n: int | None = None
) -> list[tuple]:
    """The shapes of one run's results, for tiles of ``tile_m`` x ``tile_n`` (None: one tile)."""
    partials = {
        "row": (m, -(-n // tile_n) if tile_n else 1),
        "col": (-(-m // tile_m) if tile_m else 1, n),
    }
    return [(m, n) for _ in program.stores] + [partials[r.axis] for r in program.reduces]
