# SPDX-License-Identifier: Apache-2.0
"""What a results file must say about where it was measured, and nothing about the local file
system.

Results are committed, so every text that enters one passes through :func:`scrub`.
"""

import datetime as dt
import fcntl
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

#: Variables that name the folders of what is compiled.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "QUACK_CACHE_DIR", "CODA_CACHE_DIR")
REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "quack-kernels", "nvidia-cutlass-dsl", "transformers",
            "liger-kernel", "torchao", "trl", "peft", "coda-inductor")  # fmt: skip


def _output(*command: str) -> str | None:
    """Standard output of `command`, stripped; None where it is missing, fails or prints nothing."""
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def scrub(text: str) -> str:
    """`text` without paths of this machine: those below known roots are relative, others names."""
    roots = (REPOSITORY, Path.cwd(), Path(sys.prefix), Path(sys.base_prefix))
    for root in sorted({str(root) for root in roots if root != Path("/")}, key=len, reverse=True):
        text = text.replace(root + "/", "")
    return re.sub(r"(?<![\w.:/-])/(?:[\w.+-]+/)+([\w.+-]+)", r"\1", text)


def keep(path: Path, about: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Add results to a file, to which other processes may add at the same time; what it has now."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        found = json.loads(file.read() or '{"results": {}}') | {"environment": about}
        found["results"] |= results
        file.truncate(0)
        file.write(json.dumps(found, indent=1))
    return found


def describe(
    arguments: Sequence[str], commit: str | None = None, module: str = "benchmarks"
) -> dict:
    """Device, driver, versions, commit, date (UTC) and command line of a run.

    Args:
        arguments: the command line after ``python -m`` and the module.
        commit: the measured commit, for a copy of the tree that has no ``.git``; otherwise git is
            asked.
        module: what was run.
    """
    gpu = torch.cuda.is_available() and _output(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"
    )
    name, driver = gpu.split(", ") if gpu else (None, None)
    return {
        "gpu": name,
        "driver": driver,
        "cpu": platform.machine(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "command": scrub(" ".join([f"python -m {module}", *arguments])),
    }
