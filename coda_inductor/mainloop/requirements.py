# SPDX-License-Identifier: Apache-2.0
"""The versions that this package was written against and tested with.

``pyproject.toml`` asks pip for the same ranges and the README names the tested versions; tests
compare. What is installed may still differ: ``pip install --no-deps``, a base image, a nightly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_VERSION = re.compile(r"v?(?P<numbers>\d+(?:\.\d+)*)(?P<early>[._-]?(?:a|b|c|rc|alpha|beta|dev))?")


@dataclass(frozen=True)
class Range:
    """Versions of ``package`` from ``low`` on and before ``high``, as pip reads ``>=low,<high``."""

    package: str
    low: str
    high: str

    @property
    def spec(self) -> str:
        """As in pyproject.toml, e.g. ``quack-kernels>=0.6.5,<0.7``."""
        return f"{self.package}>={self.low},<{self.high}"

    def holds(self, version: str) -> bool:
        """Is ``version`` in the range? An early release (0.6.5rc1, 0.7.0.dev2) comes before its
        number: of ``low`` it is too old, of ``high`` still too new, which is pip's rule too."""
        numbers, early = parse(version)
        low, high = parse(self.low)[0], parse(self.high)[0]
        old = numbers < low or (early and numbers == low)
        return not old and numbers < high


def parse(version: str) -> tuple[tuple[int, ...], bool]:
    """(its numbers without zeros at the end, is it an early release?); "2.13.0+cpu" is
    ((2, 13), False). What is no version has no numbers, and comes before all others."""
    found = _VERSION.match(version)
    if found is None:
        return (), False
    numbers = [int(part) for part in found["numbers"].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers), found["early"] is not None


QUACK = Range("quack-kernels", "0.6.5", "0.7")
CUTEDSL = Range("nvidia-cutlass-dsl", "4.8", "4.9")
#: The releases of torch that the tests are run with, oldest first.
TESTED_TORCH = ("2.11", "2.13", "2.15")


def untested_torch(version: str) -> str | None:
    """Why a torch of this version may behave as no test has seen, or None."""
    release = parse(version)[0][:2]
    if parse(TESTED_TORCH[0])[0] <= release <= parse(TESTED_TORCH[-1])[0]:
        return None
    age = "newer" if release > parse(TESTED_TORCH[-1])[0] else "older"
    return (
        f"torch {version} is {age} than the versions that coda_inductor is tested with "
        f"({', '.join(TESTED_TORCH)})"
    )
