"""Runs of the benchmarks' real command line, in a process of their own and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is not installed


def benchmarks(*arguments: str) -> subprocess.CompletedProcess:
    """``python -m benchmarks`` with `arguments`; what it printed is captured as text."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
