# SPDX-License-Identifier: Apache-2.0
"""GPU generations: which kernels exist on each, with which tiles, and what an epilogue needs.

Only this module compares compute capabilities. A new generation is one record in ``ARCHS`` and, so
that nothing has to be measured on users' machines, a table of times (``select/tables``).
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


def _all(*lines: str, more: str = "") -> str:
    return " ".join(f"{config}{more}" for line in lines for config in line.split())


_FEATURES = frozenset({"counter", "experts", "mixed", "accumulation", "scales", "casts"})


@dataclass(frozen=True, eq=False)
class Arch:
    """One generation of GPUs. Records are compared by identity.

    Attributes:
        name: for people.
        majors: the major compute capabilities that it covers.
        configs: the candidates as texts (``select.config``), by the kind of program: "common", and
            "fp8", "fp8 fast" and "experts" where these differ. Without "common" there are no
            kernels. The first legal one runs until a site is measured.
        rare: more candidates of the kind "common", which need more shared memory for the main loop.
        defaults: instead of the first config, the one of these that leaves the fewest processors
            idle runs.
        widest: the most columns of a tile by its rows, for the ping-pong and the cooperative
            schedule; None if that is unknown.
        smem_bytes: shared memory of a CTA.
        stages: the most stages of a tile load, and the fewest of the main loop. A kernel with no
            more than these runs only if no other is legal.
        rows, columns: the most rows of a tile that an epilogue moves at a time, and its columns if
            the program loads tiles.
        period: a thread has the same columns in each run of this many columns.
        two_ctas: two CTAs of a cluster split the rows of a tile.
        features: "counter" (tiles may be assigned by a counter in memory; elsewhere hardware does
            so in all kernels), "experts" (rows of experts), "mixed" (e4m3 times e5m2),
            "accumulation" (a kernel may sum FP8 products in the multiplier), "scales" (cuBLAS
            multiplies FP8 with a scale for each row and column), "casts" (to FP8, in hardware).
    """

    name: str
    majors: tuple[int, ...] = ()
    configs: Mapping[str, str] = field(default_factory=dict)
    rare: str = ""
    defaults: str = ""
    widest: tuple[Mapping[int, int], Mapping[int, int]] | None = None
    smem_bytes: int = 227 * 1024
    stages: tuple[int, int] = (2, 1)
    rows: int = 128
    columns: int = 32
    period: int = 8
    two_ctas: bool = False
    features: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check the record: a mistake would be a wrong kernel on a GPU that no test may run on."""
        kinds, known = {"common", "fp8", "fp8 fast", "experts"}, _FEATURES
        assert self.configs.keys() <= kinds, f"{self.name}: unknown kinds {self.configs.keys()}"
        assert self.features <= known, f"{self.name}: unknown features {self.features - known}"
        listed = " ".join([*self.configs.values(), self.rare]).split()
        assert all(re.match(r"\d+x\d+:[12]x[12]:(pp|co)", text) for text in listed), self.name
        assert set(self.defaults.split()) <= set(listed), f"{self.name}: a default is not listed"
        assert "experts" not in self.configs or "experts" in self.features, self.name

    @property
    def runs(self) -> bool:
        """Does this generation have kernels?"""
        return "common" in self.configs


_USUAL = "128x192:2x1:pp 128x160:2x1:pp 128x128:2x1:pp"
HOPPER = Arch(
    "Hopper",
    (9,),
    {
        "common": _all(
            "128x192:2x1:pp 128x160:2x1:pp 128x128:2x1:pp 128x208:2x1:pp",
            "192x128:2x1:pp 128x192:1x2:pp 128x160:1x2:pp 128x128:1x2:pp",
            "128x256:2x1:co 256x128:2x1:co 256x192:2x1:co 256x208:2x1:co",
            "256x160:2x1:co 256x192:1x2:co 256x128:1x2:co 128x256:1x2:co 128x176:2x1:pp",
            # For programs that load tiles and have only 16-bit tiles.
            _all(
                "128x192:2x1:pp 128x160:2x1:pp 128x128:2x1:pp 128x192:1x2:pp",
                "128x128:1x2:pp 128x128:2x2:pp 128x192:2x2:pp 128x256:2x1:co",
                "256x128:2x1:co 128x256:1x2:co 256x128:1x2:co 256x192:2x1:co 128x176:2x1:pp",
                more=":lean",
            ),
        ),
        # An accumulator that is added up in float32 at each step of K needs twice the registers:
        # larger tiles spill, and take up to 18x as long (128x192 ping-pong, gotchas.md).
        "fp8": "128x128:2x1:co 128x128:1x2:co 128x128:1x1:co",
        # With fast accumulation, larger tiles need no more registers than in 16 bits.
        "fp8 fast": _all(
            "128x128:2x1:co 128x256:2x1:co 128x128:1x2:co 128x192:2x1:pp",
            "256x128:2x1:co 128x256:1x2:co 128x128:2x1:pp",
        ),
        # The first ones were the fastest at most sites of an H100.
        "experts": _all(
            "128x256:1x2:co 128x256:2x1:co 128x192:2x1:pp 128x128:2x1:pp 256x128:1x2:co",
            "256x192:2x1:co 128x208:2x1:pp 128x160:2x1:pp 256x128:2x1:co",
        ),
    },
    # The fastest at some site by more than 1 %: other shapes for many rows, small tiles for few,
    # dynamic twins of the main ones.
    rare=_all(
        "128x208:2x1:pp:lean 256x160:1x2:co:lean",
        "128x64:2x1:pp 64x64:1x1:pp 64x128:1x1:pp 64x32:1x1:co",
        _all(_USUAL, more=":dyn"),
        _all(_USUAL, more=":lean:dyn"),
        "128x256:2x1:co:dyn 256x128:2x1:co:dyn",
    ),
    defaults=f"{_USUAL} 128x256:2x1:co {_all(_USUAL, '128x256:2x1:co', more=':lean')}",
    # Without QuACK's cooperative kernels of 192 and 320 rows: with an N-major B CuTeDSL ends the
    # process, lean and paired epilogues are silently wrong, and the others are not the fastest.
    widest=({64: 256, 128: 208, 192: 128}, {64: 256, 128: 256, 256: 208}),
    stages=(4, 2),
    features=frozenset({"counter", "experts", "mixed", "accumulation", "scales", "casts"}),
)
BLACKWELL = Arch(
    "data center Blackwell",
    (10, 11),
    {
        "common": _all(
            "256x256:2x1:co 256x224:2x1:co 256x192:2x1:co 256x160:2x1:co",
            "256x128:2x1:co 128x256:2x1:co 128x192:2x1:co 128x128:2x1:co",
            "256x256:2x2:co 256x128:2x2:co 128x256:1x1:co 128x192:1x1:co",
            "128x128:1x1:co 128x64:1x1:co 128x32:1x1:co",
        )
    },
    columns=64,
    two_ctas=True,
    features=frozenset({"casts"}),
)
#: It has no clusters.
CONSUMER_BLACKWELL = Arch(
    "consumer Blackwell",
    (12,),
    {
        "common": _all(
            "128x128:1x1:pp 128x64:1x1:pp 64x128:1x1:pp 128x160:1x1:pp",
            "128x128:1x1:co 128x192:1x1:co 64x64:1x1:pp 64x32:1x1:co",
        )
    },
    smem_bytes=99 * 1024,
    rows=64,
    period=32,
    features=frozenset({"mixed", "casts"}),
)
#: The generations for which QuACK has GEMMs. Its class for capability 8 (Ampere, Ada) is a stub
#: that raises NotImplementedError.
ARCHS = (HOPPER, BLACKWELL, CONSUMER_BLACKWELL)


def arch_with(capability: tuple[int, int]) -> Arch:
    """The generation with this compute capability, (major, minor)."""
    return next((a for a in ARCHS if capability[0] in a.majors), None) or _other(capability)


@functools.cache
def _other(capability: tuple[int, int]) -> Arch:
    """A generation that has no kernels of ours. Ada (8.9) was the first one with casts to FP8."""
    casts = frozenset({"casts"}) if capability >= (8, 9) else frozenset()
    return Arch("compute capability {}.{}".format(*capability), features=casts)


def arch_of(device=None) -> Arch:
    """The generation of a device (None: the current CUDA device); Hopper without CUDA."""
    device = torch.device("cuda") if device is None else torch.device(device)
    if device.type != "cuda":
        return HOPPER
    if device.index in _archs:  # asked at every launch: torch takes microseconds to answer
        return _archs[device.index]
    if not torch.cuda.is_available():
        return HOPPER
    arch = arch_with(torch.cuda.get_device_capability(device.index))
    if device.index is not None:
        _archs[device.index] = arch
    return arch


_archs: dict[int | None, Arch] = {}
