# SPDX-License-Identifier: Apache-2.0
"""The GPU that a decision is for, and constants that were measured on its model."""

import functools
import json
import os
import re
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

from coda_inductor.arch import Arch, arch_with
from coda_inductor.errors import OptionError, suggest

_SHIPPED = Path(__file__).parent / "select" / "tables"


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    Attributes:
        name: the model's name in the driver.
        capability: its compute capability, (major, minor).
        processors: its multiprocessors.
        processor_flops: flops of one processor per microsecond, in cuBLAS's large 16-bit products.
        bytes_per_us: the rate of one of Inductor's elementwise kernels.
        launch_us: the GPU's time to start one kernel.
        host_call_us, host_gemm_us: host time of a call of a graph (guards), and the additional host
            time of each fused GEMM with its surroundings.
        host_step_us, host_trained_us: the same for a training step, with autograd.
        rated: were the constants measured on a model of its generation? If not, every site must be
            measured.
        sites: the file with the measurements of sites on exactly this model; None without a file.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    bytes_per_us: float
    launch_us: float = 2.0
    host_call_us: float = 55.0
    host_gemm_us: float = 21.0
    host_step_us: float = 630.0
    host_trained_us: float = 40.0
    processor_flops: float = 5.6e6
    rated: bool = False
    sites: Path | None = None

    @property
    def arch(self) -> Arch:
        """The GPU's generation."""
        return arch_with(self.capability)

    @property
    def flops_per_us(self) -> float:
        """The rate of large 16-bit products in cuBLAS; a multiply-add counts as two."""
        return self.processors * self.processor_flops

    @property
    def short(self) -> str:
        """The short name of the model: ``H200``."""
        return re.sub(r" \d+GB.*", "", self.name.removeprefix("NVIDIA "))

    @property
    def article(self) -> str:
        """The short name with an article: ``an H200``."""
        return f"{'an' if self.short[0] in 'AEFHILMNORSX8' else 'a'} {self.short}"

    @property
    def file(self) -> str:
        """The name of files about this model: ``nvidia_h200``."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")


def read(path: Path) -> Gpu:
    """The GPU that a table describes. Raises OSError if it cannot be read, and ValueError,
    KeyError, TypeError if it is not a table."""
    data = json.loads(path.read_text())
    constants: dict[str, Any] = data["constants"]
    constants["capability"] = tuple(constants["capability"])
    constants.pop("smem_bytes", None)  # in tables of users
    return Gpu(data["device"], processors=data["processors"], rated=True, sites=path, **constants)


#: Decisions are for this GPU if the machine has no GPU (explain, tests).
H100 = read(_SHIPPED / "nvidia_h100_80gb_hbm3.json")


@functools.lru_cache(maxsize=4)
def tables(setting: str | None) -> dict[str, Gpu]:
    """The GPU models that have a table, by name. ``setting`` is the value of ``CODA_TABLES``: a
    folder of tables that replaces the shipped ones; with an empty folder there are none."""
    folder = Path(setting).expanduser() if setting else _SHIPPED
    return {gpu.name: gpu for gpu in map(read, sorted(folder.glob("*.json")))}


def gpu_of(device=None) -> Gpu:
    """The GPU of ``device`` (None: the current one); an H100 for a CPU, or without CUDA."""
    device = torch.device("cuda") if device is None else torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return H100
    index = torch.cuda.current_device() if device.index is None else device.index
    return _gpu(index, os.environ.get("CODA_TABLES"))


@functools.lru_cache(maxsize=64)
def _gpu(index: int, setting: str | None) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    capability = found.major, found.minor
    return match_gpu(found.name, capability, found.multi_processor_count, tables(setting))


def find_gpu(name: str) -> Gpu:
    """The GPU model with a table that has the short name ``name``, e.g. "h200". Raises OptionError
    if there is no table of such a GPU."""
    gpus = {gpu.short.lower(): gpu for gpu in tables(os.environ.get("CODA_TABLES")).values()}
    if (gpu := gpus.get(name.lower())) is None:
        names = ", ".join(gpus)
        if re.match(r"[alptv]\d", name.lower()):  # an A100, L40S, P100, T4, V100
            text = f"no kernels run on a GPU {name!r}: they need Hopper or newer"
            raise OptionError(f"{text}. Measured are {names}")
        hint = suggest(name.lower(), gpus)
        raise OptionError(f"there are no measurements of a GPU {name!r}{hint}, only of {names}")
    return gpu


def match_gpu(
    name: str, capability: tuple[int, int], processors: int, shipped: dict[str, Gpu]
) -> Gpu:
    """The GPU with these properties: from its table, else with its own number of processors and the
    constants of a GPU of its generation, the one with the most similar name (for an H20: an H200).
    For other generations the constants are an H200's, and it is not ``rated``."""
    if name in shipped:
        return replace(shipped[name], processors=processors)
    siblings = [gpu for gpu in shipped.values() if gpu.arch == arch_with(capability)]
    lender = max(
        siblings or [tables(None)["NVIDIA H200"]],
        key=lambda gpu: SequenceMatcher(None, gpu.short, name).ratio(),
    )
    return replace(
        lender, name=name, capability=capability, processors=processors,
        sites=None, rated=bool(siblings),
    )  # fmt: skip
