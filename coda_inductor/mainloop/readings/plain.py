# SPDX-License-Identifier: Apache-2.0
"""The reading of one A and one B, in place if TMA can; and the interface of all readings."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coda_inductor.mainloop.tensors import a_major, b_major, laid_out, readable, tma_matrix
from coda_inductor.program import EpilogueProgram

Tensors = Sequence[Tensor]
#: The dimensions of A and B with stride 1: "m" or "k", "k" or "n".
Majors = tuple[str, str]
#: A kernel's A and B, its variant, and its distances.
Binding = tuple[Tensor, Tensor, str, tuple[int, ...]]
#: (as_, bs) of a call -> the same. Raises UnpairableError if the call must be bound the full way.
Read = Callable[[Tensors, Tensors], Binding]
#: Code and text of a refusal.
Why = tuple[str, str] | None
#: (dtype, scale) -> a function that creates tensors.
Factory = Callable[[str, float], Callable[..., Tensor]]
#: as_ and bs.
Factors = tuple[Tensors, Tensors]


class Plain:
    """Reads A (M, K) and B (K, N), each of either major, of 16 bits.

    Attributes:
        variants: kernels that differ in the order of addresses, which is known at a launch.
        distances: names of launch arguments, the distances between allocations in elements.
        terms: the number of products in an accumulator.
    """

    variants: tuple[str, ...] = ("",)
    distances: tuple[str, ...] = ()
    terms = 1

    def fits(self, program: EpilogueProgram, terms: int) -> bool:
        """Does this reading apply to ``terms`` products of ``program``, if no earlier one does?"""
        return True

    def refuses(self, site: Any) -> Why:
        """The reason why ``site`` (``select.site``) has no kernel with this reading, or None."""
        return None

    def suits(self, program: EpilogueProgram, config: Any) -> bool:
        """Can a kernel with this config use this reading?"""
        return True

    def kind(self, program: EpilogueProgram) -> str:
        """The kind of configs that kernels of ``program`` have (``Arch.configs``)."""
        return "common"

    def majors(self, as_: Tensors, bs: Tensors) -> Majors:
        """The majors of A and B that a kernel gets; fake tensors suffice."""
        return a_major(as_[0]), b_major(bs[0])

    def kernels(self, as_: Tensors, bs: Tensors) -> list[tuple[str, str, str]]:
        """(A's major, B's major, variant) of each kernel that such a call may launch. No addresses
        are read: fake tensors suffice."""
        return [(*self.majors(as_, bs), variant) for variant in self.variants]

    def left(self, a: Tensor) -> Tensor:
        """``a`` itself if a kernel can read it, else a copy."""
        return tma_matrix(a, either_major=True)

    def right(self, b: Tensor) -> Tensor:
        """``b`` itself if a kernel can read it, else a copy."""
        return tma_matrix(b, either_major=True)

    def bind(self, as_: Tensors, bs: Tensors) -> Binding:
        """The operands of any call, copied if they cannot be read in place. Raises UnpairableError
        if they can neither be read nor copied."""
        return self.left(as_[0]), self.right(bs[0]), "", ()

    def in_place(self, as_: Tensors, bs: Tensors) -> Read | None:
        """A function that binds calls which differ from this one only in M and in addresses
        (multiples of 16 bytes); None if operands are copied. Raises UnpairableError if this call is
        not read in place; others may be."""
        fits = readable(as_[0], either_major=True) and readable(bs[0], either_major=True)
        return self.reads(as_, bs) if fits else None

    def reads(self, as_: Tensors, bs: Tensors) -> Read:
        """What :meth:`in_place` returns if TMA can read both operands."""
        return lambda as_, bs: (as_[0], bs[0], "", ())

    def mixins(self, program: EpilogueProgram, variant: str) -> tuple[type, ...]:
        """The mixins for QuACK's kernel class."""
        return ()

    def dummies(
        self, program: EpilogueProgram, m: int, n: int, k: int, majors: Majors, device: Any
    ) -> tuple[Tensor, Tensor]:
        """A and B to compile a kernel, ``n`` columns an accumulator; a grouped B has two groups."""
        empty = functools.partial(torch.empty, device=device)
        a = functools.partial(empty, dtype=getattr(torch, program.a_dtype))
        b = functools.partial(empty, *[2] * program.grouped, dtype=getattr(torch, program.b_dtype))
        columns = n * len(program.accs)
        return laid_out(a, m, k, majors[0] == "k"), laid_out(b, k, columns, majors[1] == "n")

    def inputs(self, site: Any, factory: Factory) -> Factors:
        """The tensors (as_, bs) for measuring ``site``."""
        program, a = site.program, factory(site.program.a_dtype, 1.0)
        as_ = [laid_out(a, site.rows or site.m, k, site.a_major == "k") for k in site.ks]
        bs, groups = [], [site.groups] * program.grouped
        for k in (k for k in site.ks for _ in program.accs):
            b = functools.partial(factory(program.b_dtype, self.scale(k)), *groups)
            bs.append(laid_out(b, k, site.n, site.b_major == "n"))
        return as_, bs

    def scale(self, k: int) -> float:
        """The factor that weights get in measurements, so that products are of order one."""
        return k**-0.5

    def unfused(self, program: EpilogueProgram, as_: Tensors, bs: Tensors) -> Factors:
        """The factors that an unfused graph has, for ``reference.run``."""
        return as_, bs

    def plain(
        self, program: EpilogueProgram, as_: Tensors, bs: Tensors, operands: Tensors
    ) -> Callable[[], list[Tensor]]:
        """A function that computes only the products, as an unfused graph does."""
        factors = [*zip([*as_] * len(program.accs), bs, strict=True)]  # a pair has one A
        return lambda: [self.product(program, a, b) for a, b in factors]

    def product(self, program: EpilogueProgram, a: Tensor, b: Tensor) -> Tensor:
        """The product that cuBLAS computes."""
        return torch.mm(a, b)
