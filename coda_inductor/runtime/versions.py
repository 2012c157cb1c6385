# SPDX-License-Identifier: Apache-2.0
"""What the machine contributes to a compiled graph's identity: library versions and the GPUs."""

from __future__ import annotations

import functools

import torch

from coda_inductor.mainloop.availability import kernel_stack, library_stack
from coda_inductor.mainloop.environment import environment, version

_LIBRARIES = ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")


@functools.lru_cache(maxsize=1)
def identity() -> tuple[str, ...]:
    """Versions of torch and of the kernel libraries ("absent" without one), what else a kernel's
    code depends on, the GPUs' names, and why there are no kernels on each. Part of the joint pass's
    cache key: another version or GPU must not hit old entries."""
    versions = [f"{library} {version(library)}" for library in _LIBRARIES]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [
        f"gpu {torch.cuda.get_device_name(d)}: {kernel_stack(d) or 'runs'}"
        for d in (torch.device("cuda", i) for i in range(count))
    ]
    machine = f"machine {' '.join(environment())}"
    kernels = f"kernels {library_stack() or 'compile'}"
    return (f"torch {torch.__version__}", *versions, machine, *(gpus or ["gpu absent"]), kernels)
