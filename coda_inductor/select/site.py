# SPDX-License-Identifier: Apache-2.0
"""A site: a program, its sizes and its surroundings, and the choice for it."""

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from coda_inductor.arch import HOPPER, Arch
from coda_inductor.graph.sizes import hint
from coda_inductor.mainloop.readings import reading_of
from coda_inductor.mainloop.readings.plain import Plain
from coda_inductor.mainloop.tensors import a_major, b_major
from coda_inductor.program import EpilogueProgram
from coda_inductor.refusal import Refusal, refuse
from coda_inductor.report import UNFUSED, Choice

_META = torch.device("meta")


@dataclass(frozen=True)
class Site:
    """A site: ``program`` on (m, k) x (k, n). For pairs, N is the N of one weight. It begins with a
    program that only stores its product, and is refined by ``dataclasses.replace``.

    Attributes:
        terms: the number of products that one kernel reads in place; ``k`` is the sum of their K's.
        copied: instead of ``terms``, the K of each product whose weights are concatenated at every
            call.
        after: the stores that an elementwise kernel reads, where that kernel runs anyway (for
            example a norm that no GEMM reads). Unfused, it reads the products, writes the others.
        a_major: the dimension of A with stride 1, "k" or "m".
        b_major: the dimension of B with stride 1, "k" (a linear layer's weight) or "n".
        device: the device that it runs on; "meta" is a GPU that is absent.
        arch: the generation of the GPU that decisions are for.
        name: the names of its GEMMs' modules, for readers.
        groups: experts of a grouped program, each with its own weights.
        rows: the rows of the matrix from which a program gathers; 0 if it does not.
        crowded: may collectives hold some processors while a kernel runs? With 16 of an H200's 132
            held, a GEMM of 356 us took 608, and 416 with tiles from a counter (cuBLAS: 445).
        choice: the choice how it runs, once it is made.
    """

    program: EpilogueProgram
    m: int
    n: int
    k: int
    terms: int = 1
    copied: tuple[int, ...] = ()
    after: frozenset[str] = frozenset()
    a_major: str = "k"
    b_major: str = "k"
    device: torch.device = _META
    name: str = ""
    crowded: bool = False
    groups: int = 0
    rows: int = 0
    arch: Arch = HOPPER
    choice: Choice = UNFUSED

    @staticmethod
    def of(program: EpilogueProgram, a: Tensor, b: Tensor, shape: tuple, **more: Any) -> "Site":
        """The site of ``program``, of ``shape`` (M, N, K), whose first operands are ``a`` and
        ``b``. They may be fake, and M symbolic."""
        m, n, k = shape
        majors: Any = {"a_major": a_major(a), "b_major": b_major(b)}
        groups = b.shape[0] if program.grouped else 0
        rows = hint(a.shape[0]) if program.routes[1] is not None else 0
        return Site(program, hint(m), n, k, **majors, groups=groups, rows=rows, **more)

    @property
    def ks(self) -> tuple[int, ...]:
        """K of each product in the accumulator."""
        return self.copied or (self.k // self.terms,) * self.terms

    @functools.cached_property
    def reading(self) -> Plain:
        """The kernel's reading of A and B."""
        return reading_of(self.program, self.terms)

    @functools.cached_property
    def refusal(self) -> Refusal | None:
        """The reason why it cannot be a kernel, or None."""
        from coda_inductor.select.legality import unsupported

        why = unsupported(self)
        return None if why is None else refuse(*why, failure=True)


#: The fields of a site that concern one compilation only.
_TRANSIENT = frozenset({"after", "device", "crowded", "arch", "choice"})


def site_text(site: Site) -> dict[str, Any]:
    """``site`` as data for messages and files. Inverse: :func:`site_from`."""
    data = {f.name: getattr(site, f.name) for f in fields(site) if f.name not in _TRANSIENT}
    return data | {"program": site.program.to_json()}


def site_from(text: dict[str, Any]) -> Site:
    """Inverse of :func:`site_text`."""
    values = {**text, "copied": tuple(text["copied"])}
    return Site(EpilogueProgram.from_json(values.pop("program")), **values)
