# SPDX-License-Identifier: Apache-2.0
"""What a decision is about: a program, its sizes and its surroundings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from coda_inductor.program import EpilogueProgram


@dataclass(frozen=True)
class Site:
    """``program`` on (m, k) x (k, n); N is one weight's for pairs.

    Attributes:
        terms: how many products one kernel reads in place; ``k`` is the sum of all their K's.
        copied: instead of ``terms``, the K of each product whose weights are concatenated at every
            call.
        after: the stores that an elementwise kernel reads, where that kernel runs anyway (for
            example a norm that no GEMM reads). Unfused, it reads the products, writes the others.
        a_major: the dimension of A with stride 1, "k" or "m".
        b_major: the dimension of B with stride 1, "k" (a linear layer's weight) or "n".
        device: where it runs; None for an H100.
        name: of its GEMMs' modules, for readers.
        groups: experts of a grouped program, each with its own weights.
        rows: of the matrix from which a program gathers its rows; 0 if it does not.
        crowded: collectives may hold some processors while a kernel runs. A kernel that assigns its
            tiles in advance waits for them: with 16 of an H200's 132 processors held, a GEMM of 356
            us took 608, and 416 with tiles from a counter (cuBLAS: 445).
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
    device: torch.device | None = None
    name: str = ""
    crowded: bool = False
    groups: int = 0
    rows: int = 0

    @property
    def ks(self) -> tuple[int, ...]:
        """K of each product that the accumulator is the sum of."""
        return self.copied or (self.k // self.terms,) * self.terms


def site_text(site: Site) -> dict[str, Any]:
    """``site`` as data for messages and files. Inverse: :func:`site_from`."""
    kept = {name: x for name, x in vars(site).items() if name not in ("after", "device", "crowded")}
    return kept | {"program": site.program.to_json()}


def site_from(text: dict[str, Any]) -> Site:
    """Inverse of :func:`site_text`."""
    given = {**text, "copied": tuple(text["copied"])}
    return Site(EpilogueProgram.from_json(given.pop("program")), **given)
