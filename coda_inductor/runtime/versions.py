"""What the machine contributes to a compiled graph's identity: library versions and the GPU."""

from __future__ import annotations

import functools
import importlib.metadata

import torch

from coda_inductor.runtime.support import kernel_stack

_LIBRARIES = ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")


@functools.lru_cache(maxsize=1)
def identity() -> tuple[str, ...]:
    """Versions of torch and of the kernel libraries, and the GPU's name; "absent" for what is not
    there; why there are no kernels. Part of the joint pass's cache key: another version or GPU must
    not hit old entries."""
    versions = [f"torch {torch.__version__}"]
    for library in _LIBRARIES:
        try:
            versions.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{library} absent")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "absent"
    return (*versions, f"gpu {gpu}", f"kernels {kernel_stack() or 'run'}")
