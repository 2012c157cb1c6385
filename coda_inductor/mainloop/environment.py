# SPDX-License-Identifier: Apache-2.0
"""The versions that this package was written against and tested with, and the parts of the machine
and the environment that a kernel's code depends on.

``pyproject.toml`` has the same ranges for pip, and the README names the tested versions; tests
compare them. Installed versions may still differ (``pip install --no-deps``, a nightly).
"""

import importlib.metadata
import os
import platform
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
#: The parts of nvidia-cutlass-dsl: the installed ones determine for which CUDA it compiles.
_VARIANTS = tuple(f"nvidia-cutlass-dsl-libs-{name}" for name in ("base", "core", "cu12", "cu13"))
#: Not the user's options: the first is a compile worker's, and QuACK's keys have the architecture;
#: the second is set by CuTeDSL itself.
_IGNORED = ("CUTE_DSL_ARCH", "CUTE_DSL_LIBS")


def environment() -> tuple[str, ...]:
    """The machine type, CuTeDSL's CUDA variants with their versions, and the ``CUTE_DSL_*``
    options. They are part of every kernel's key, so that hosts with a common home do not share
    kernels that only one of them can load."""
    options = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("CUTE_DSL_") and name not in _IGNORED
    )
    return (platform.machine(), *_variants(), *options)


def label() -> str:
    """The environment as a folder's name, without options:
    ``x86_64-quack0.6.5-cutlass4.8.1-cu12``."""
    cuda = [v.split()[0].rsplit("-", 1)[1] for v in _variants() if "cu1" in v]
    versions = f"quack{version(QUACK.package)}", f"cutlass{version(CUTEDSL.package)}"
    return "-".join([platform.machine() or "machine", *versions, *cuda])


def _variants() -> list[str]:
    variants = [f"{name} {version(name)}" for name in _VARIANTS]
    return [text for text in variants if not text.endswith(" absent")]


def version(library: str) -> str:
    """The installed version of ``library``, or "absent"."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
