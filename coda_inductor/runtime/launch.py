# SPDX-License-Identifier: Apache-2.0
"""From tensors to the launch of a kernel."""

import contextlib
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coda_inductor.codegen.ports import ports
from coda_inductor.errors import KernelError
from coda_inductor.mainloop.readings import reading_of, reading_with
from coda_inductor.mainloop.tensors import UnpairableError, tma_matrix, vector
from coda_inductor.program import EpilogueProgram, Reduce
from coda_inductor.runtime.compiler import KernelRequest
from coda_inductor.runtime.prepared import Prepared, call_key, prepare
from coda_inductor.select.config import Config

#: The most kinds of calls of one kernel that are prepared at a time.
_MOST_PREPARED = 256
#: Seconds until a kernel that could not be built is tried again.
_FIRST_PAUSE = 60.0
_log = logging.getLogger("coda_inductor")


class Kernel:
    """One program with one config. Kernels are compiled on first use, for the majors of A and B,
    the reading of them, and the device; they serve every M, N and K."""

    def __init__(self, program: EpilogueProgram, config: Config):
        self.program = program
        self.config = config
        self.mapping = ports(program)
        self.reading = functools.cache(functools.partial(reading_of, program))
        self._dtypes = [getattr(torch, o.dtype) for o in program.operands]
        # (A's major, B's, the reading's variant, device) -> a launch plan
        self.plans: dict[tuple, object] = {}
        # key of similar calls -> their launch; None if only the full way works
        self._prepared: dict[tuple, Prepared | None] = {}

    def __call__(
        self, as_: list[Tensor], bs: list[Tensor], operands: list[Tensor]
    ) -> list[Tensor] | None:
        """Launch, and return the outputs, if a call like this one was prepared; else None."""
        prepared = self._prepared.get(call_key(as_, bs, operands))
        return None if prepared is None else prepared(as_, bs, operands)

    def prepare(
        self, as_: list[Tensor], bs: list[Tensor], operands: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Prepare calls like this one, which has been launched."""
        key = call_key(as_, bs, operands)
        if key in self._prepared:
            return
        if len(self._prepared) >= _MOST_PREPARED:  # sizes change all the time
            self._prepared.clear()

        try:
            prepared = prepare(self, as_, bs, operands, outputs)
        except UnpairableError:  # this one was copied; the next may not be
            return
        except Exception as error:  # it still runs, some microseconds slower
            _log.debug("%s %s is not prepared: %r", self.program.key, self.config, error)
            prepared = None
        self._prepared[key] = prepared

    def launch(
        self, as_: list[Tensor], bs: list[Tensor], operands: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Compute ``outputs``, which the caller has allocated by ``reference.output_shapes``.
        Raises UnpairableError if the weights of a paired program cannot be read as one operand, and
        KernelError if the kernel cannot be built. Trying takes seconds, so that failure is
        remembered until :func:`forget_failures`, or for a pause that doubles each time, because a
        cause such as a full disk may go away."""
        reading = self.reading(len(as_))
        a, b, variant, distances = reading.bind(as_, bs)  # copied terms have no distances
        values: dict[str, object] = dict(zip(reading.distances, distances, strict=False))
        c = self._bind_operands(operands, a.device, values)
        d, interleaved = self._bind_outputs(outputs, values)
        key = *reading.majors([a], [b]), variant, a.device
        plan = self.plans.get(key) or self._plan(key)
        routes = [None if i is None else vector(operands[i]) for i in self.program.routes]
        with _on_device(a.device):
            _run(plan, a, b, d, c, values, *routes)
        for output, partials in interleaved:
            output.copy_(partials[:, ::2])

    def _plan(self, key: tuple) -> object:
        why, until, pause = _unbuilt.get((self, key), ("", 0.0, _FIRST_PAUSE))
        if why and time.monotonic() < until:
            raise KernelError(why)
        try:
            self._build(*key)
        except torch.OutOfMemoryError:  # the next call may find room
            raise
        except Exception as error:
            _unbuilt[self, key] = repr(error), time.monotonic() + pause, 2 * pause
            raise KernelError(repr(error)) from error
        return self.plans[key]

    def _build(self, a_major: str, b_major: str, variant: str, device: torch.device) -> None:
        from coda_inductor.mainloop.build import build

        # The next call's operands may have the other order of addresses, and during the capture of
        # a CUDA graph no kernel can be loaded.
        for other in reading_with(self.program, variant).variants:
            with _on_device(device):
                plan = build(self.program, self.config, a_major, b_major, other, device=device)
                self.plans[a_major, b_major, other, device] = plan

    def _bind_operands(self, operands, device, values) -> Tensor | None:
        """Store operands by name, in the form that the kernel needs. Returns C, or None."""
        for operand, dtype, x in zip(self.program.operands, self._dtypes, operands, strict=True):
            if operand.spec.route:
                continue
            if operand.kind == "scalar":
                values[operand.name] = x.to(device=device, dtype=torch.float32).contiguous()
                continue
            ready = x if x.dtype == dtype else x.to(dtype)
            values[operand.name] = tma_matrix(ready) if operand.spec.staged else vector(ready)
        values.update(self.mapping.numbers)
        return values.pop(self.mapping.c, None)

    def _bind_outputs(self, outputs, values) -> tuple[Tensor | None, list]:
        """Store outputs by name. Returns D, and the column partials to compact: in a paired program
        they are (m_tiles, 2N), and only every other column counts."""
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


# A kernel and its plan -> why it could not be built, when to try again, and the current pause.
_unbuilt: dict[tuple, tuple[str, float, float]] = {}


@functools.cache
def kernel(program: str, config: str) -> Kernel:
    """The kernel of a serialized program and a config as text. It depends only on these."""
    return Kernel(EpilogueProgram.from_json(program), Config.parse(config))


def forget_failures() -> None:
    """Try all failed builds again: the user may have fixed the cause."""
    _unbuilt.clear()


def requests(
    as_: Sequence[Tensor], bs: Sequence[Tensor], program: str, config: str
) -> list[KernelRequest]:
    """The kernels that a call of the op with such inputs may launch, to be compiled before it. Only
    shapes, strides and dtypes count, so the inputs may be fake tensors. Kernels that differ by the
    order of two addresses are all returned."""
    reading = reading_of(EpilogueProgram.from_json(program), len(as_))
    return [KernelRequest(program, config, *key) for key in reading.kernels(as_, bs)]


def _run(*arguments: Any) -> None:
    from coda_inductor.mainloop.plan import run

    run(*arguments)


def _on_device(device: torch.device):
    """A context that makes ``device`` current. If it is current, as nearly always, nothing is done,
    which saves microseconds."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
