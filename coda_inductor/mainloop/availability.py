# SPDX-License-Identifier: Apache-2.0
"""Can kernels be built and run in this process? The functions return reasons and raise nothing."""

import functools
import importlib.util
import re
from pathlib import Path

import torch

from coda_inductor.arch import Arch, arch_with
from coda_inductor.compat import KERNELS
from coda_inductor.mainloop.environment import CUTEDSL, QUACK, environment, version
from coda_inductor.refusal import Refusal, refuse

_LIBRARIES = ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")


@functools.lru_cache(maxsize=1)
def identity() -> tuple[str, ...]:
    """The machine's part of a compiled graph's identity: versions of torch and of the kernel
    libraries ("absent" without one), the environment of a kernel's code, and for each GPU its name
    and why it has no kernels. Another version or GPU must not hit old cache entries."""
    versions = [f"{library} {version(library)}" for library in _LIBRARIES]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [
        f"gpu {torch.cuda.get_device_name(d)}: {kernel_stack(d) or 'runs'}"
        for d in (torch.device("cuda", i) for i in range(count))
    ]
    machine = f"machine {' '.join(environment())}"
    kernels = f"kernels {library_stack() or 'compile'}"
    return (f"torch {torch.__version__}", *versions, machine, *(gpus or ["gpu absent"]), kernels)


@functools.lru_cache(maxsize=64)
def kernel_stack(device: torch.device | None = None) -> Refusal | None:
    """The reason why no kernel can run in this process on ``device`` (None: the current CUDA
    device), or None. Imports no kernel library. A GPU that is absent ("meta") counts as complete.
    """
    if device is not None and device.type == "meta":
        return None
    if not torch.cuda.is_available():
        why = "torch sees none; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        if torch.version.cuda is None:
            build = f"torch {torch.__version__} is built without CUDA"
            why = f"{build}; kernels need a build with CUDA"
        return refuse("no-cuda", f"no CUDA device is available: {why}")
    arch = arch_with(torch.cuda.get_device_capability(device))
    return unsupported_gpu(arch) or library_stack()


def unsupported_gpu(arch: Arch) -> Refusal | None:
    """The reason why no kernel runs on GPUs of this generation, or None."""
    text = f"{arch.name} is not supported: {QUACK.spec} has no GEMM for it"
    return None if arch.runs else refuse("old-gpu", text)


def scales_vectors(device: torch.device) -> bool:
    """Does cuBLAS multiply FP8 with a scale for each row and column on ``device``? It does from
    CUDA 12.9 on, on Hopper (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    if device.type == "meta":
        return True
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    arch = arch_with(torch.cuda.get_device_capability(device))
    return cuda >= (12, 9) and "scales" in arch.features


@functools.lru_cache(maxsize=1)
def library_stack() -> Refusal | None:
    """The reason why no kernel can be compiled here, on any device, or None."""
    for library in (QUACK, CUTEDSL):
        package, installed = library.package, version(library.package)
        if installed == "absent":
            text = f"{package} is not installed: pip install 'coda-inductor[cuda]'"
            return refuse("no-kernel-stack", text)
        if not library.holds(installed):
            needs = f">={library.low},<{library.high} is needed: pip install '{library.spec}'"
            return refuse("no-kernel-stack", f"{package} {installed} is installed, {needs}")
    if importlib.util.find_spec("cutlass") is None:
        text = "nvidia-cutlass-dsl is installed without its libraries (no module cutlass): "
        text += "pip install --force-reinstall 'coda-inductor[cuda]'"
        return refuse("no-kernel-stack", text)
    if (name := missing_from_libraries()) is None:
        return None
    of = CUTEDSL if name.startswith("cutlass") else QUACK
    text = f"{of.package} {version(of.package)} has no {name}, which coda_inductor needs: another "
    return refuse("no-kernel-stack", f"{text}version of {of.spec} may have it")


def missing_from_libraries() -> str | None:
    """The first private name that the installed QuACK or CuTeDSL lacks, or None. Their files are
    read, not imported, because an import takes seconds."""
    return next((path for path in KERNELS if not _exists(path)), None)


def _exists(path: str) -> bool:
    module, _, name = path.rpartition(".")
    file = _file(module)
    text = "" if file is None else file.read_text("utf-8", "replace")
    return _file(path) is not None or bool(re.search(rf"\b{name}\b", text))


@functools.cache
def _file(module: str) -> Path | None:
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [Path(folder).joinpath(*parts) for folder in folders or ()]
    files = (f for path in paths for f in (path.with_suffix(".py"), path / "__init__.py"))
    return next(filter(Path.is_file, files), None)
