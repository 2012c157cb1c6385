# SPDX-License-Identifier: Apache-2.0
"""The custom op ``coda_inductor::gemm_epilogue``, which represents a fused site in the graph.

``gemm_epilogue(as_, bs, operands, program, config, site, strict) -> Tensor[]`` computes an epilogue
program on the sum of ``as_[j] @ bs[j]``, or, if the program is paired, on ``as_[0] @ bs[0]`` and
``as_[0] @ bs[1]``. Shapes: as_[j] (M, K_j), bs[j] (K_j, N), or (E, K_j, N) if it is grouped;
operands as in ``program.operands``; outputs as in ``reference.output_shapes``, reductions in
float32 (float64 for a float64 GEMM). Outputs never alias inputs.

All that a call depends on is in the graph: the program and the config as strings, the module path
of its GEMMs (``site``, for messages), and whether it may fall back (``strict``). So a graph is
printable, and cacheable across processes.

CUDA tensors run through a generated kernel. All others, and every call whose kernel cannot be built
or launched, run through the reference executor, after one warning that names the cause.
"""

import functools
import math

import torch

from coda_inductor.arch import arch_of
from coda_inductor.errors import KernelError
from coda_inductor.log import logger, warn_once
from coda_inductor.mainloop import availability
from coda_inductor.mainloop.tensors import UnpairableError
from coda_inductor.program import EpilogueProgram, Store, reference
from coda_inductor.program.dtypes import dtype_name
from coda_inductor.program.ir import LEAST_PART
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.runtime.launch import kernel
from coda_inductor.select.config import Config
from coda_inductor.select.site import Site
from coda_inductor.semantic.define import LIB, opaque


def gemm_epilogue(
    as_, bs, operands, program: EpilogueProgram | str, config: Config | str, site="", strict=False
):
    """Call the op. Returns the list of outputs. Raises KernelError if ``strict``, and there is no
    kernel for these CUDA tensors."""
    text = program if isinstance(program, str) else program.to_json()
    return OP(as_, bs, operands, text, str(config), site, strict)


def _allocate(program: EpilogueProgram, config: Config, as_, bs, operands):
    """Uninitialized outputs. This is also the fake implementation: M, N and K may be symbolic."""
    a, m, n = as_[0], program.rows(as_, operands), program.columns(bs)
    tile_m = config.cta_tile_m(arch_of(a.device))
    # The tile of a pair holds both accumulators, side by side.
    tile_n = config.tile_n // len(program.accs)
    wide = reference.compute_dtype(program)
    return [
        a.new_empty(shape, dtype=getattr(torch, o.dtype) if isinstance(o, Store) else wide)
        for o, shape in zip(
            program.outputs, reference.output_shapes(program, m, n, tile_m, tile_n), strict=True
        )
    ]


def _fake(as_, bs, operands, program, config, *_):
    return _allocate(EpilogueProgram.from_json(program), Config.parse(config), as_, bs, operands)


def _reference(as_, bs, operands, program, config, *_):
    parsed = EpilogueProgram.from_json(program)
    outputs = _allocate(parsed, Config.parse(config), as_, bs, operands)
    if not parsed.rows(as_, operands) or not bs[0].shape[-1]:
        return outputs
    for spec, output, value in zip(
        parsed.outputs, outputs, reference.run(parsed, as_, bs, operands), strict=True
    ):
        if isinstance(spec, Store):
            output.copy_(value)
            continue
        # The reference has one tile: its value is in the first one, the others are neutral.
        output.fill_(0.0 if spec.combine in ("add", "entropy") else -math.inf)
        output.narrow(spec.dim, 0, 1).copy_(value)
    return outputs


def _cuda(as_, bs, operands, program, config, site="", strict=False):
    entry = kernel(program, config)
    try:
        prepared = entry(as_, bs, operands)
    except Exception as error:  # the full way converts what it can, and raises otherwise
        logger.debug("the prepared launch at %s failed: %r", site or program, error)
        prepared = None
    if prepared is not None:
        return prepared
    a = as_[0]
    k = sum(x.shape[1] for x in as_)
    b, terms, n = bs[0], len(as_), entry.program.columns(bs)
    majors = entry.reading(terms).kernels(as_, bs)[0][:2]
    why = _unsupported(program, n, k, (a.dtype, b.dtype), majors, terms, a.device)
    if why is not None:
        return _fall_back(why.text, as_, bs, operands, program, config, site, strict)
    m = entry.program.rows(as_, operands)
    if entry.program.too_thin(m, operands):
        cause = f"a part of the batch has fewer rows than the largest tile, {LEAST_PART}"
        return _fall_back(cause, as_, bs, operands, program, config, site, strict)
    outputs = _allocate(entry.program, entry.config, as_, bs, operands)
    if m == 0:
        return outputs
    try:
        entry.launch(as_, bs, operands, outputs)
        entry.prepare(as_, bs, operands, outputs)
    except Exception as error:  # of this call: what no later one can do, ``entry`` knows
        expected = isinstance(error, (UnpairableError, KernelError))
        cause = str(error) if expected else repr(error)
        return _fall_back(cause, as_, bs, operands, program, config, site, strict, error)
    return outputs


@functools.lru_cache(maxsize=4096)
def _unsupported(
    program: str, n: int, k: int, dtypes: tuple[torch.dtype, torch.dtype], majors: tuple[str, str],
    terms: int, device: torch.device,
) -> Refusal | None:  # fmt: skip
    parsed = EpilogueProgram.from_json(program)
    expected = parsed.a_dtype, parsed.b_dtype
    if expected != tuple(map(dtype_name, dtypes)):
        want, have = (" and ".join(dict.fromkeys(map(str, pair))) for pair in (expected, dtypes))
        text = f"the program is for {want} inputs, but they are {have}"
        return refuse("kernel-dtype", text, failure=True)
    left, right = majors
    site = Site(parsed, 0, n, k, terms, a_major=left, b_major=right, arch=arch_of(device))
    return availability.kernel_stack(device) or site.refusal


def _fall_back(cause, as_, bs, operands, program, config, site, strict, error=None):
    label = f"program {EpilogueProgram.from_json(program).key}"
    where = f"({as_[0].shape[1]} x {bs[0].shape[-1]}, config {config})"
    where = f"at {site} {where}" if site else where
    if strict:
        raise KernelError(f"{label} {where} has no kernel: {cause}") from error
    warn_once(label, cause, to="the reference executor, op by op", first=where)
    return _reference(as_, bs, operands, program, config)


def _direct(as_, *others):
    """Call the op without the dispatcher, if there are no gradients, modes and fake tensors."""
    return _cuda(as_, *others) if as_[0].is_cuda else OP(as_, *others)


#: The op, as it is in graphs.
OP = opaque(
    "gemm_epilogue(Tensor[] as_, Tensor[] bs, Tensor[] operands, str program, str config, "
    'str site="", bool strict=False) -> Tensor[]',
    _reference,
    _fake,
    torch.Tag.flexible_layout,
)
OP.direct, OP.fake = _direct, _fake
LIB.impl("gemm_epilogue", _cuda, "CUDA")
