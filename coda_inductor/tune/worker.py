# SPDX-License-Identifier: Apache-2.0
"""The measuring process, separate so that a candidate that hangs or crashes harms no other process.

It is a child (``processes``) that receives messages, until it ends with its parent:

- ``{"site": {...}}`` answers ``{"ready": true}`` when the unfused candidate is compiled;
- ``{"site": {...}, "configs": [...]}`` answers ``{"figures": {...}}``, or ``{"error": why}``;
  before each candidate's first run, ``{"trying": config}``.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coda_inductor import locks
from coda_inductor.cache_dir import private_dir
from coda_inductor.errors import KernelError
from coda_inductor.processes.start import Messages
from coda_inductor.program import EpilogueProgram, reference
from coda_inductor.runtime.op import gemm_epilogue
from coda_inductor.select.figures import Figures, to_row
from coda_inductor.select.site import Site, site_from
from coda_inductor.tune import inputs, timing

#: Seconds to wait for another process that times on this GPU; then both run.
_PATIENCE = 60.0
#: Largest error of a candidate's output against the unfused one's, over its norm, and of a single
#: element over the root of its mean square, where roundings are 0.004 and below 0.1. The second one
#: detects a single unwritten tile of thousands.
_WRONG, _WRONG_ONE = 0.05, 0.5


def main(parent: Messages, index: str) -> None:
    """Answer the messages of ``parent``. ``index``: the number of the CUDA device."""
    torch.cuda.set_device(int(index))
    worker = Worker(parent.send)
    while True:
        worker.answer(parent.recv())


class Worker:
    """Measures on the current device, and passes its answers to ``say``."""

    def __init__(self, say: Callable[[dict[str, Any]], None]):
        self._say = say
        uuid = getattr(torch.cuda.get_device_properties(), "uuid", torch.cuda.current_device())
        self._alone = private_dir() / f"gpu-{uuid}"
        self._unfused: dict[str, Callable[..., list[Tensor]]] = {}

    def answer(self, message: dict[str, Any]) -> None:
        """Answer one message: see the module's docstring."""
        try:
            site = site_from(message["site"])
            unfused = self._unfused.setdefault(repr(message["site"]), _compiled(site.program))
            if "configs" not in message:
                unfused(*inputs.unfused(site, inputs.tensors(site, "cuda", values=False)))
                self._say({"ready": True})
                return
            with locks.lock_file(self._alone, _PATIENCE):  # no other process of this user's
                figures = self._figures(site, message["configs"], unfused)
            self._say({"figures": to_row("", figures)})
        except Exception as error:
            self._say({"error": f"{type(error).__name__}: {error}"[:500]})
            torch.cuda.synchronize()  # a lost context ends the process here
        finally:
            torch.cuda.empty_cache()

    def _figures(
        self, site: Site, configs: Sequence[str], unfused: Callable[..., list[Tensor]]
    ) -> Figures:
        tensors = inputs.tensors(site, "cuda")
        expected = unfused(*inputs.unfused(site, tensors))
        calls = {name: _call(site, name, tensors, unfused) for name in ("plain", "unfused")}
        failed: dict[str, str] = {}
        for config in configs:
            self._say({"trying": config})
            call = _call(site, config, tensors, unfused)
            try:
                why = _wrong(site.program, call(), expected)
                torch.cuda.synchronize()
            except KernelError as error:
                why = str(error)[:200]
            if why is None:
                calls[config] = call
            else:
                failed[config] = why
        times = timing.steady(lambda: timing.measure(calls))
        us, spread = {name: t.median for name, t in times.items()}, timing.typical(times)
        us, spread = {n: float(f"{t:.4g}") for n, t in us.items()}, float(f"{spread:.3g}")
        kernels = {name: us[name] for name in configs if name in us}
        return Figures(kernels, us["unfused"], us["plain"], spread, failed, site.m)


def _compiled(program: EpilogueProgram) -> Callable[..., list[Tensor]]:
    """A function that runs the program as Inductor does: cuBLAS products and generated kernels."""

    def unfused(as_: list[Tensor], bs: list[Tensor], operands: list[Tensor]) -> list[Tensor]:
        return reference.run(program, as_, bs, operands, exact=False)

    # Dynamo limits how often one code object is compiled, so each function gets its own.
    code = unfused.__code__.replace(co_name="unfused")
    copy = types.FunctionType(code, globals(), "unfused", None, unfused.__closure__)
    return torch.compile(copy, dynamic=False, fullgraph=True)


def _call(
    site: Site, name: str, tensors: inputs.Inputs, unfused: Callable[..., list[Tensor]]
) -> Callable[[], list[Tensor]]:
    """A function that runs only the products ("plain"), ``unfused``, or the kernel of a config."""
    if name == "plain":
        return site.reading.plain(site.program, *tensors)
    if name == "unfused":
        stock = inputs.unfused(site, tensors)
        return lambda: unfused(*stock)
    program, text = site.program, site.program.to_json()

    def call() -> list[Tensor]:
        outputs = gemm_epilogue(*tensors, text, name, "tuning", strict=True)
        return reference.combined(program, outputs)  # the partials of all tiles

    return call


def _wrong(program: EpilogueProgram, got: list[Tensor], expected: list[Tensor]) -> str | None:
    """The reason if a candidate's results differ from the unfused results, or None."""
    for output, x, y in zip(program.outputs, got, expected, strict=True):
        difference, right = x.float() - y.float(), y.float()
        norm = torch.linalg.vector_norm(right).clamp_min(1e-20)
        error = (torch.linalg.vector_norm(difference) / norm).item()
        if not error < _WRONG:
            return f"wrong: {output.name} is off by {error:.2g} of its norm"
        scale = right.numel() ** 0.5 / norm
        peak = (difference.abs().max() * scale).item()
        # In few bits the next value after a large number is far away.
        next_one = torch.finfo(y.dtype).eps * right.abs().max() * scale
        if not peak < _WRONG_ONE + next_one:
            return f"wrong: one of {output.name} is off by {peak:.2g} of their mean square's root"
    return None
