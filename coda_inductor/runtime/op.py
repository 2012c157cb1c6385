# SPDX-License-Identifier: Apache-2.0
"""The custom op ``coda_inductor::gemm_epilogue``: what a fused site is in the graph.

``gemm_epilogue(as_, bs, operands, program, config) -> Tensor[]`` computes an epilogue program on
the sum of ``as_[j] @ bs[j]``, or, if the program is paired, on ``as_[0] @ bs[0]`` and
``as_[0] @ bs[1]``. The program and the config are strings, so a graph that contains the op is
self-contained: printable, and cacheable across processes. Shapes: as_[j] (M, K_j), bs[j] (K_j, N);
operands as ``program.operands`` says; outputs as ``reference.output_shapes`` says, reductions in
float32 (float64 for a float64 GEMM). Functional: outputs never alias inputs.

CUDA tensors run through a generated kernel, all others, and every site for which a kernel cannot
be built or launched, through the reference executor, after one warning that names the cause.
"""

from __future__ import annotations

import errno
import functools
import math
import time

import torch
from torch import Tensor

from coda_inductor.errors import KernelError
from coda_inductor.log import warn_once
from coda_inductor.mainloop import availability
from coda_inductor.program import EpilogueProgram, Store, reference
from coda_inductor.runtime.launch import kernel
from coda_inductor.runtime.tensors import UnpairableError
from coda_inductor.select import legality
from coda_inductor.select.config import Config
from coda_inductor.select.device import arch_of

_LIBRARY = torch.library.Library("coda_inductor", "FRAGMENT")
_LIBRARY.define(
    "gemm_epilogue(Tensor[] as_, Tensor[] bs, Tensor[] operands, str program, str config)"
    " -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)

# Plain module variables: backward graphs run on autograd's own threads.
_mode = {"strict": False}
#: What a machine gets over: a full disk, too many open files, a cache that is not answering.
_PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO,
     errno.EINTR, errno.ESTALE, errno.ETIMEDOUT}
)  # fmt: skip
#: Seconds until a kernel that could not be had for such a reason is asked for again: it may take
#: seconds to fail once more.
_RETRY_SECONDS = 60.0
# (program, config) -> why its kernel failed, and until when it is not tried again.
_failed: dict[tuple[str, str], tuple[str, float]] = {}


def set_strict(strict: bool) -> None:
    """With ``strict``, a kernel that cannot run raises KernelError instead of falling back."""
    _mode["strict"] = strict


def forget_failures() -> None:
    """Try the kernels of failed sites again (for tests, and after a broken setup was mended)."""
    _failed.clear()


def gemm_epilogue(as_, bs, operands, program: EpilogueProgram | str, config: Config | str):
    """Call the op. Returns the list of outputs."""
    text = program if isinstance(program, str) else program.to_json()
    return torch.ops.coda_inductor.gemm_epilogue(as_, bs, operands, text, str(config))


def _allocate(program: EpilogueProgram, config: Config, a: Tensor, bs: list[Tensor]):
    """Uninitialised outputs. Also the fake implementation: M, N and K may be symbolic."""
    m, n = a.shape[0], bs[0].shape[1]
    tile_m = config.cta_tile_m(arch_of(a.device))
    # The tile of a pair holds both accumulators, side by side.
    tile_n = config.tile_n // 2 if program.paired else config.tile_n
    wide = reference.compute_dtype(program)
    return [
        a.new_empty(shape, dtype=getattr(torch, o.dtype) if isinstance(o, Store) else wide)
        for o, shape in zip(
            program.outputs, reference.output_shapes(program, m, n, tile_m, tile_n), strict=True
        )
    ]


@torch.library.register_fake("coda_inductor::gemm_epilogue", lib=_LIBRARY)
def _fake(as_, bs, operands, program, config):  # noqa: ARG001 (the op's signature)
    return _allocate(EpilogueProgram.from_json(program), Config.parse(config), as_[0], bs)


def _reference(as_, bs, operands, program, config):
    parsed = EpilogueProgram.from_json(program)
    outputs = _allocate(parsed, Config.parse(config), as_[0], bs)
    if not as_[0].shape[0] or not bs[0].shape[1]:
        return outputs
    for spec, output, value in zip(
        parsed.outputs, outputs, reference.run(parsed, as_, bs, operands), strict=True
    ):
        if isinstance(spec, Store):
            output.copy_(value)
            continue
        # The reference has one tile: its value stands in the first, the others are neutral.
        output.fill_(0.0 if spec.combine == "add" else -math.inf)
        output.narrow(1 if spec.axis == "row" else 0, 0, 1).copy_(value)
    return outputs


def _cuda(as_, bs, operands, program, config):
    if (failure := _failed.get((program, config))) is not None:
        if time.monotonic() < failure[1]:
            return _fall_back(failure[0], as_, bs, operands, program, config)
        del _failed[program, config]
    entry = kernel(program, config)
    a = as_[0]
    k = sum(x.shape[1] for x in as_)
    why = _unsupported(program, bs[0].shape[1], k, a.dtype, bs[0].stride(1) == 1, a.device)
    if why is not None:
        return _fall_back(why, as_, bs, operands, program, config)
    outputs = _allocate(entry.program, entry.config, a, bs)
    if a.shape[0] == 0:
        return outputs
    try:
        entry.launch(as_, bs, operands, outputs)
    except UnpairableError as error:  # these weights, perhaps not the next ones
        return _fall_back(str(error), as_, bs, operands, program, config, error)
    except Exception as error:
        if not isinstance(error, torch.OutOfMemoryError):  # the next call may find room
            pause = _RETRY_SECONDS if _passes(error) else math.inf
            _failed[program, config] = repr(error), time.monotonic() + pause
        return _fall_back(repr(error), as_, bs, operands, program, config, error)
    return outputs


def _passes(error: BaseException | None) -> bool:
    """Is ``error``, or what caused it, gone by itself later on? Libraries wrap what they catch."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in _PASSING:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


@functools.lru_cache(maxsize=4096)
def _unsupported(
    program: str, n: int, k: int, dtype: torch.dtype, n_major: bool, device: torch.device | None
) -> str | None:
    parsed = EpilogueProgram.from_json(program)
    if getattr(torch, parsed.in_dtype) != dtype:
        return f"the program is for {parsed.in_dtype} inputs, they are {dtype}"
    why = availability.kernel_stack(device) or legality.unsupported(
        parsed, n, k, b_major="n" if n_major else "k", device=device
    )
    return None if why is None else why.text


def _fall_back(cause, as_, bs, operands, program, config, error=None):
    parsed = EpilogueProgram.from_json(program)
    site = f"program {parsed.key} ({as_[0].shape[1]} x {bs[0].shape[1]}, config {config})"
    if _mode["strict"]:
        raise KernelError(f"{site} has no kernel: {cause}") from error
    warn_once(site, cause, to="the reference executor, op by op")
    return _reference(as_, bs, operands, program, config)


#: The op, as graphs hold it.
OP = torch.ops.coda_inductor.gemm_epilogue.default
_LIBRARY.impl("gemm_epilogue", _reference, "CompositeExplicitAutograd")
_LIBRARY.impl("gemm_epilogue", _cuda, "CUDA")
