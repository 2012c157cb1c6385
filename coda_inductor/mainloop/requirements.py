# SPDX-License-Identifier: Apache-2.0
"""The versions that this package was written against and tested with.

``pyproject.toml`` has the same ranges for pip, and the README names the tested versions; tests
compare them. Installed versions may still differ: ``pip install --no-deps``, a base image, a
nightly.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class Range:
    """Versions of ``package`` from ``low`` up to, but not including, ``high``."""

    package: str
    low: str
    high: str

    @property
    def spec(self) -> str:
        """The range as in pyproject.toml, e.g. ``quack-kernels>=0.6.5,<0.7``."""
        return f"{self.package}>={self.low},<{self.high}"

    def holds(self, version: str) -> bool:
        """Is ``version`` in the range? As with pip, a prerelease of ``low`` (0.6.5rc1) is too old,
        and one of ``high`` (0.7.0.dev2) is too new."""
        return self.low <= TorchVersion(version) < f"{self.high}.dev0"


QUACK = Range("quack-kernels", "0.6.5", "0.7")
CUTEDSL = Range("nvidia-cutlass-dsl", "4.8", "4.9")
#: The releases of torch that the tests are run with, oldest first.
TESTED_TORCH = ("2.11", "2.13", "2.15")
