# SPDX-License-Identifier: Apache-2.0
"""From tensors to a launched kernel."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from coda_inductor.codegen.ports import ports
from coda_inductor.errors import KernelError
from coda_inductor.program import EpilogueProgram, Reduce
from coda_inductor.runtime.prepared import Prepared, alike, prepare
from coda_inductor.runtime.tensors import (
    UnpairableError,
    joint_view,
    pair_view,
    tma_matrix,
    unjoinable,
    vector,
)
from coda_inductor.runtime.worker import KernelRequest
from coda_inductor.select.config import Config

#: What a machine gets over: a full disk, too many open files, a cache that is not answering.
_PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO,
     errno.EINTR, errno.ESTALE, errno.ETIMEDOUT}
)  # fmt: skip
#: Seconds until a kernel that could not be had for such a reason is asked for again: it may take
#: seconds to fail once more.
_RETRY_SECONDS = 60.0
#: Kinds of calls of one kernel that are prepared for at a time.
_MOST_PREPARED = 256
_log = logging.getLogger("coda_inductor")


class Kernel:
    """One program with one config. Kernels are compiled per majors of A and B, how these are read
    and device, on first use, and serve every M, N and K."""

    def __init__(self, program: EpilogueProgram, config: Config):
        self.program = program
        self.config = config
        self.mapping = ports(program)
        self._dtypes = [getattr(torch, o.dtype) for o in program.operands]
        # (A's major, B's, lanes swapped?, how two terms are read, device) -> a launch plan
        self._plans: dict[tuple, object] = {}
        # the same -> why it could not be built, and until when that is not tried again
        self._unbuilt: dict[tuple, tuple[str, float]] = {}
        # what calls have in common -> what serves all of them; None where the long way is the only
        self._prepared: dict[tuple, Prepared | None] = {}

    def __call__(
        self, as_: list[Tensor], bs: list[Tensor], operands: list[Tensor]
    ) -> list[Tensor] | None:
        """Launch, and return the outputs, if a call like this one was prepared for; else None."""
        found = self._prepared.get(alike(as_, bs, operands))
        return None if found is None else found(as_, bs, operands)

    def prepare(self, as_: list[Tensor], bs: list[Tensor], operands: list[Tensor]) -> None:
        """Prepare for calls like this one, which has been launched."""
        key = alike(as_, bs, operands)
        if key in self._prepared or (len(as_) > 1 and torch.are_deterministic_algorithms_enabled()):
            return
        if len(self._prepared) >= _MOST_PREPARED:  # sizes that change without end
            self._prepared.clear()

        def plan(*how):
            variant = (*how, as_[0].device)
            return self._plans[variant]

        try:
            found = prepare(self.program, self.config, plan, as_, bs, operands)
        except Exception as error:  # it runs without, at the cost of microseconds
            _log.debug("%s %s is not prepared: %r", self.program.key, self.config, error)
            found = None
        self._prepared[key] = found

    def launch(
        self, as_: list[Tensor], bs: list[Tensor], operands: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Fill ``outputs``, allocated by the caller as ``reference.output_shapes`` says.

        Raises:
            KernelError: the kernel cannot be built. That takes seconds to find out, so it is known
                from then on: for a minute where it may pass, else until :func:`forget_failures`.
            UnpairableError: the weights of a paired program cannot be read as one operand.
            Exception: whatever the launch raises.
        """
        values: dict[str, object] = {}
        a, b, swap_lanes, joined = self._bind_inputs(as_, bs, values)
        c = self._bind_operands(operands, a.device, values)
        d, interleaved = self._bind_outputs(outputs, values)
        majors = ("k" if a.stride(1) == 1 else "m", "n" if b.stride(1) == 1 else "k")
        key = (*majors, swap_lanes, joined, a.device)
        plan = self._plans.get(key) or self._built(key)
        with _on_device(a.device):
            _quack_launcher()(plan, a, b, d, c, values)
        for output, partials in interleaved:
            output.copy_(partials[:, ::2])

    def forget_failures(self) -> None:
        """Build again what could not be built."""
        self._unbuilt.clear()

    def _built(self, key: tuple) -> object:
        why, until = self._unbuilt.get(key, ("", -math.inf))
        if time.monotonic() < until:
            raise KernelError(why)
        try:
            self._build(*key)
        except torch.OutOfMemoryError:  # the next call may find room
            raise
        except Exception as error:
            pause = _RETRY_SECONDS if _passes(error) else math.inf
            self._unbuilt[key] = repr(error), time.monotonic() + pause
            raise KernelError(repr(error)) from error
        return self._plans[key]

    def _build(
        self, a_major: str, b_major: str, swap_lanes: bool, joined: str, device: torch.device
    ) -> None:
        from coda_inductor.mainloop.build import build

        # What the next call reads may lie in the other order, and while a CUDA graph is captured
        # no kernel can be loaded.
        lanes = (False, True) if self.program.paired else (swap_lanes,)
        ways = ("straight", "crossed") if joined else ("",)
        for swap, way in itertools.product(lanes, ways):
            with _on_device(device):
                plan = build(self.program, self.config, a_major, b_major, swap, way, device=device)
                self._plans[a_major, b_major, swap, way, device] = plan

    def _bind_inputs(self, as_, bs, values) -> tuple[Tensor, Tensor, bool, str]:
        """(A, B, swap_lanes, joined): the operands as the kernel wants them, and the variant of it
        that reads them so. Terms that cannot be read in place are copied into one operand; so are
        all under ``torch.use_deterministic_algorithms``, for in place the sum starts with the term
        at the lower address, which is the allocator's choice."""
        fp8 = self.program.fp8  # read along K, and nothing else
        if self.program.paired:
            b, values["pair_delta"], swapped = pair_view(*bs)
            return tma_matrix(as_[0], either_major=not fp8), b, swapped, ""
        if fp8:
            return tma_matrix(as_[0]), tma_matrix(bs[0].t()).t(), False, ""
        if len(as_) > 1:
            found = None
            if not torch.are_deterministic_algorithms_enabled():
                with contextlib.suppress(UnpairableError):
                    found = joint_view(as_, bs)
            if found is not None:
                a, b, values["join_delta_a"], values["join_delta_b"], crossed = found
                return a, b, False, "crossed" if crossed else "straight"
            as_, bs = [torch.cat(as_, 1)], [torch.cat(bs, 0)]
        a, b = (tma_matrix(x, either_major=True) for x in (as_[0], bs[0]))
        return a, b, False, ""

    def _bind_operands(self, operands, device, values) -> Tensor | None:
        """Put operands under their names, as the kernel wants them; returns the C operand."""
        c = None
        for operand, dtype, x in zip(self.program.operands, self._dtypes, operands, strict=True):
            if operand.kind == "scalar":
                values[operand.name] = x.to(device=device, dtype=torch.float32).contiguous()
                continue
            ready = x if x.dtype == dtype else x.to(dtype)
            ready = tma_matrix(ready) if operand in self.program.loads else vector(ready)
            if operand.name == self.mapping.c:
                c = ready
            else:
                values[operand.name] = ready
        values.update({step.name: self.program.head for step in self.mapping.across})
        return c

    def _bind_outputs(self, outputs, values) -> tuple[Tensor | None, list]:
        """Put outputs under their names; returns D, and the column partials that need compacting:
        those of a paired program are (m_tiles, 2N), and every other column counts."""
        d, interleaved = None, []
        paired = self.program.paired
        for spec, output in zip(self.program.outputs, outputs, strict=True):
            if spec == self.mapping.d:
                d = output
            elif paired and isinstance(spec, Reduce) and spec.axis == "col":
                partials = output.new_empty(output.shape[0], 2 * output.shape[1])
                interleaved.append((output, partials))
                values[spec.name] = partials
            else:
                values[spec.name] = output
        return d, interleaved


# Plans of this process. What a kernel is depends on its program and config, not on who calls it.
_kernels: dict[tuple[str, str], Kernel] = {}


def kernel(program: str, config: str) -> Kernel:
    """The kernel of a serialized program with a config in text form."""
    found = _kernels.get((program, config))
    if found is None:
        made = Kernel(EpilogueProgram.from_json(program), Config.parse(config))
        found = _kernels.setdefault((program, config), made)
    return found


def forget_failures() -> None:
    """Let what could not be built be tried again: whoever compiles may have mended the cause."""
    for known in list(_kernels.values()):
        known.forget_failures()


def _passes(error: BaseException | None) -> bool:
    """Is ``error``, or what caused it, gone by itself later on? Libraries wrap what they catch."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in _PASSING:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def requests(
    as_: Sequence[Tensor], bs: Sequence[Tensor], program: str, config: str
) -> list[KernelRequest]:
    """The kernels that a call of the op with such inputs may launch, to be compiled ahead of it.

    Asks for what is known before it runs, so that fake tensors will do: shapes, strides and dtypes.
    Kernels that differ by the order of two addresses are all returned.
    """
    ask = functools.partial(KernelRequest, program, config)
    if len(bs) > len(as_):
        return [ask(swap_lanes=swap) for swap in (False, True)]
    if EpilogueProgram.from_json(program).fp8:  # read along K: whatever lies otherwise is copied
        return [ask()]
    b_major = "n" if bs[0].stride(1) == 1 else "k"
    if len(as_) > 1:
        copied = unjoinable(as_, bs) is not None or torch.are_deterministic_algorithms_enabled()
        if copied:
            return [ask(b_major="n")]  # of what torch.cat makes
        return [ask(b_major=b_major, joined=joined) for joined in ("straight", "crossed")]
    return [ask(b_major=b_major, a_major="m" if as_[0].stride(0) == 1 else "k")]


@functools.lru_cache(maxsize=1)
def _quack_launcher():
    from coda_inductor.mainloop.build import run_gemm_epi_plan

    return run_gemm_epi_plan


def _on_device(device: torch.device):
    """Entering the current device again costs microseconds, and is nearly always what it is."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
