# SPDX-License-Identifier: Apache-2.0
"""Check a pattern's claims on numbers, each time a user's file is loaded.

Both sides of each claim (``prove``) are computed in float64 on drawn inputs, and must agree
wherever both are finite. That takes milliseconds. It can refute a claim but not prove it: ``python
-m coda_inductor check`` proves.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from coda_inductor.compat import disable_current_modes
from coda_inductor.patterns.meaning import Signature
from coda_inductor.patterns.pattern import Pattern
from coda_inductor.patterns.sides import against_op, check_readable, gradient_tuple
from coda_inductor.semantic.define import parameters

#: (shape of the tensors of a meaning, standard deviation): functions may change for small or large
#: values. The tensors of an op have its example's shapes.
DRAWS = (((24,), 2.0), ((5, 8), 2.0), ((2, 3, 16), 30.0), ((4, 32), 0.1), ((64,), 1e-3))
#: The allowed rounding of float64, relative to an element and to the largest one.
RTOL, ATOL = 1e-8, 1e-11

Values = Mapping[str, Any]


def compare(pattern: Pattern) -> None:
    """Compare the two sides of each claim of ``pattern`` on drawn numbers.

    Raises:
        PatternError: two sides differ; it names the inputs and the difference. Or the matcher
            cannot read an idiom, or a function fails.
    """
    check_readable(pattern)
    # Without the default device, the gradients and the modes of the compilation that loads it.
    with torch.device("cpu"), torch.no_grad(), disable_current_modes():
        _Comparison(pattern).run()


class _Comparison:
    """The comparison of one pattern; ``finite``: claims with a finite result for some input."""

    def __init__(self, pattern: Pattern):
        self.pattern = pattern
        self.chance = torch.Generator().manual_seed(0)
        self.finite: dict[str, bool] = {}
        self.scale, self.zeros = 1.0, False

    def run(self) -> None:
        check = self._meaning if self.pattern.meaning is not None else self._op
        for i, (shape, self.scale) in enumerate(DRAWS):
            self.zeros = i == 1
            check(shape)
        for claim, finite in self.finite.items():
            if not finite:
                why = "neither side is a real number at any point that was tried"
                raise self.pattern.error(f"{claim}: {why}")

    def _meaning(self, shape: tuple[int, ...]) -> None:
        pattern, meaning = self.pattern, self.pattern.meaning
        assert meaning is not None
        signature = Signature(meaning)
        args = {
            name: self._tensor(shape)
            if name in signature.tensors
            else round(3 * float(torch.randn((), generator=self.chance)), 3)
            for name in signature.names
        }
        right = self._call(meaning, args)
        for idiom in pattern.idioms:
            claim = f"{idiom.__name__} = {meaning.__name__}"
            if idiom is meaning:  # which may be random
                claim = f"two calls of {meaning.__name__}"
            self._agree(claim, self._call(idiom, args), right, args)
        if pattern.gradient is None or self.zeros:  # a derivative may not exist at zero
            return

        def function(*tensors: Tensor) -> Tensor:
            return meaning(**{**args, **dict(zip(signature.tensors, tensors, strict=True))})

        dy = self._tensor(shape)
        names = parameters(pattern.gradient)
        have = self._call(pattern.gradient, dict(zip(names, (dy, *args.values()), strict=True)))
        want = torch.func.vjp(function, *(args[name] for name in signature.tensors))[1](dy)
        for name, a, b in zip(signature.tensors, gradient_tuple(pattern, have), want, strict=True):
            self._agree(f"gradient with respect to {name}", a, b, {"dy": dy, **args})

    def _op(self, _shape: tuple[int, ...]) -> None:
        for idiom, args, left, right in against_op(self.pattern, lambda _, *of: self._tensor(*of)):
            self._agree(f"{idiom.__name__} = {self.pattern.name}", left, right, args)

    def _call(self, function: Callable[..., Any], args: Values) -> Any:
        try:
            return function(**args)
        except Exception as error:
            why = f"{function.__name__} cannot be run on tensors: {type(error).__name__}: {error}"
            raise self.pattern.error(why) from error

    def _agree(self, claim: str, x: Any, y: Any, args: Values) -> None:
        """Raise if two results differ where both are finite."""
        on = ", ".join(
            f"{k} {tuple(v.shape) if isinstance(v, Tensor) else v}" for k, v in args.items()
        )
        if x.shape != y.shape:
            why = f"{tuple(x.shape)} against {tuple(y.shape)} on inputs {on}"
            raise self.pattern.error(f"{claim}: {why}")
        finite = x.isfinite() & y.isfinite()
        self.finite[claim] = self.finite.get(claim, False) or bool(finite.any())
        a, b = x[finite], y[finite]
        gap = (a - b).abs()
        excess = gap - RTOL * b.abs() - ATOL * max(b.abs().tolist(), default=0)
        if (excess > 0).any():
            i = int(excess.argmax())
            text = f"{a[i].item():.9g} against {b[i].item():.9g}, {gap[i].item():.3g} apart"
            raise self.pattern.error(f"{claim}: the results differ: {text}, on inputs {on}")

    def _tensor(self, shape: Any, dtype: torch.dtype = torch.float64) -> Tensor:
        """A tensor of normal values. In one draw half are zero, where conditions often change."""
        drawn = self.scale * torch.randn(shape, dtype=dtype, generator=self.chance)
        return drawn * (torch.rand(shape, generator=self.chance) < 0.5) if self.zeros else drawn
