"""From tensors to a launched kernel. The only module of the runtime that needs QuACK."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from coda_inductor.kernels.ports import ports
from coda_inductor.program import EpilogueProgram, Reduce
from coda_inductor.runtime.config import Config
from coda_inductor.runtime.tensors import pair_view, tma_matrix, vector


class Kernel:
    """One program with one config. Kernels are compiled per majors of A and B, lane order and
    device, on first use, and serve every M, N and K."""

    def __init__(self, program: EpilogueProgram, config: Config):
        self.program = program
        self.config = config
        self.mapping = ports(program)
        self._dtypes = [getattr(torch, o.dtype) for o in program.operands]
        self._plans: dict[tuple, object] = {}

    def launch(
        self, as_: list[Tensor], bs: list[Tensor], operands: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Fill ``outputs``, allocated by the caller as ``reference.output_shapes`` says.

        Raises whatever building the kernel raises, and UnpairableError if the weights of a paired
        program cannot be read as one operand.
        """
        values: dict[str, object] = {}
        swapped = False
        a, bs = _joined(as_, bs)
        a = tma_matrix(a, either_major=True)
        if self.program.paired:
            b, values["pair_delta"], swapped = pair_view(*bs)
        else:
            b = tma_matrix(bs[0], either_major=True)
        c = self._bind_operands(operands, a.device, values)
        d, interleaved = self._bind_outputs(outputs, values)
        plan = self._plan(
            "k" if a.stride(1) == 1 else "m", "n" if b.stride(1) == 1 else "k", swapped, a.device
        )
        with _on_device(a.device):
            _quack_launcher()(plan, a, b, d, c, values)
        for output, partials in interleaved:
            output.copy_(partials[:, ::2])

    def _plan(self, a_major: str, b_major: str, swapped: bool, device: torch.device):
        key = (a_major, b_major, swapped, device.index)
        plan = self._plans.get(key)
        if plan is None:
            from coda_inductor.kernels.build import build

            with _on_device(device):
                plan = self._plans[key] = build(
                    self.program,
                    self.config,
                    a_major=a_major,
                    b_major=b_major,
                    swap_lanes=swapped,
                    device=device,
                )
        return plan

    def _bind_operands(self, operands, device, values) -> Tensor | None:
        """Put operands under their names, as the kernel wants them; returns the C operand."""
        c = None
        for operand, dtype, x in zip(self.program.operands, self._dtypes, operands, strict=True):
            if operand.kind == "scalar":
                values[operand.name] = x.to(device=device, dtype=torch.float32).contiguous()
                continue
            ready = x if x.dtype == dtype else x.to(dtype)
            ready = tma_matrix(ready) if operand.kind == "tile" else vector(ready)
            if operand.name == self.mapping.c:
                c = ready
            else:
                values[operand.name] = ready
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


def _joined(as_: list[Tensor], bs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A sum of products is one product over concatenated K."""
    if len(as_) == 1:
        return as_[0], bs
    return torch.cat(as_, 1), [torch.cat(bs, 0)]


@functools.cache
def kernel(program: str, config: str) -> Kernel:
    """The kernel of a serialized program with a config in text form."""
    return Kernel(EpilogueProgram.from_json(program), Config.parse(config))


@functools.lru_cache(maxsize=1)
def _quack_launcher():
    from quack.gemm_runtime.host import run_gemm_epi_plan

    return run_gemm_epi_plan


def _on_device(device: torch.device):
    """Entering the current device again costs microseconds, and is nearly always what it is."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
