# SPDX-License-Identifier: Apache-2.0
"""The door to the kernels: passes, plan and backend import this and nothing of what is behind it
(``select``, ``mainloop``, ``codegen``, ``runtime``, ``tune``).

A program is one node in the graph, whoever computes it: a call of ``coda_inductor::gemm_epilogue``.
:class:`Kernels` is what can compute programs. There are two: ``QUACK``, our epilogues in QuACK's
main loops, and :class:`Reference`, torch's ops, which Inductor compiles. The names below the
classes are what a graph or a message needs to know of the kernels besides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node

from coda_inductor.codegen.render import render
from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import arguments, fake
from coda_inductor.mainloop import availability
from coda_inductor.mainloop.readings.join import joinable
from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal
from coda_inductor.report import Choice
from coda_inductor.runtime import direct, launch, on_cuda, pool
from coda_inductor.runtime.linear_cross_entropy import BACKWARD as HEAD_GRADIENTS
from coda_inductor.runtime.op import OP
from coda_inductor.select.choice import host_bound, select, unmeasured
from coda_inductor.select.config import Config, legal_configs
from coda_inductor.select.legality import unaligned
from coda_inductor.select.measurements import Measurements, generation, measurements_of
from coda_inductor.select.roofline import product_us
from coda_inductor.select.site import Site
from coda_inductor.semantic.experts import WGRAD
from coda_inductor.tune.tuner import Tuner

__all__ = [
    "HEAD_GRADIENTS", "OP", "QUACK", "Kernels", "Measurements", "Reference", "Site", "Tuner",
    "call", "has_config", "host_bound", "joinable", "measurements_of", "pool",
    "product_us", "render", "tile", "unmeasured",
]  # fmt: skip


class Kernels(Protocol):
    """What can compute epilogue programs."""

    def refuses(self, site: Site, *matrices: torch.Tensor) -> Refusal | None:
        """The reason why ``site`` cannot be computed, or None. ``matrices``: A and B, which may be
        fake, if their alignment counts."""

    def choose(self, site: Site, *, gated: bool, store: Measurements | None) -> Choice:
        """How does ``site`` run? With ``gated``, only if that is expected, or was measured in
        ``store``, to be faster than the unfused ops."""


class Quack:
    """Our epilogues in QuACK's main loops. Importing it imports no kernel library."""

    #: What its answers depend on, besides the site: the function that reads each fact, by its name.
    #: They are part of the keys of torch's caches.
    facts: Mapping[str, Callable[[], Any]] = {
        "versions": availability.identity,
        "measurements": generation,
    }

    def missing(self, device: torch.device | None = None) -> Refusal | None:
        """The reason why nothing runs on ``device`` (None: the current one), or None."""
        return availability.kernel_stack(device)

    def refuses(self, site: Site, *matrices: torch.Tensor) -> Refusal | None:
        names = "its left operand", "its right operand"
        copied = map(unaligned, names, matrices)
        return site.refusal or next((why for why in copied if why is not None), None)

    choose = staticmethod(select)

    def requests(self, call: Node) -> list[pool.KernelRequest]:
        """The kernels that ``call``, a call of the op, may launch, to be compiled before it."""
        args = arguments(call)
        if call.target is WGRAD:
            a, rows, *bs = (x and fake(x) for x in (args["a"], args["rows"], *args["bs"]))
            return on_cuda.requests(a, rows, bs, args["turned"])
        left, right = ([fake(x) for x in args[name]] for name in ("as_", "bs"))
        return launch.requests(left, right, args["program"], args["config"])

    def scales_vectors(self, device: torch.device) -> bool:
        """Does cuBLAS on ``device`` scale rows and columns of FP8 products?"""
        return availability.scales_vectors(device)

    def try_again(self) -> None:
        """Forget which kernels could not be built: the user may have fixed the cause."""
        launch.forget_failures()


class Reference:
    """torch's ops, by ``program.reference``; ``why``: the reason why no kernel runs."""

    #: Gives the partials of a call their shape until it is expanded; any legal config will do.
    config = str(Config(128, 128, 2, 1, True))

    def __init__(self, why: Refusal):
        self._why = why

    def refuses(self, *_: Any) -> Refusal | None:
        return None

    def choose(self, *_: Any, **__: Any) -> Choice:
        return Choice(config=self.config, refusal=self._why, how="reference")


QUACK = Quack()


def call(
    put: Put, site: Site, as_: Sequence[Node], bs: Sequence[Node], operands: Sequence[Node], *,
    strict: bool,
) -> Node:  # fmt: skip
    """Put a call of the op into the graph. It computes ``site``, of which a choice was made."""
    direct.install()
    text, config = site.program.to_json(), site.choice.config
    return put(OP, as_, bs, operands, text, config, site.name, strict)


def tile(config: str) -> tuple[int, int]:
    """The rows and columns of one tile."""
    parsed = Config.parse(config)
    return parsed.tile_m, parsed.tile_n


def has_config(program: EpilogueProgram, config: str, arch: Any) -> bool:
    """Is there a kernel of ``program`` with ``config`` on GPUs of the generation ``arch``?"""
    return Config.parse(config) in legal_configs(program, arch)
