# SPDX-License-Identifier: Apache-2.0
"""Runs each job in a process of its own, so that no variant can take the others' figures with it.

A process that dies while it prepares a variant is started again without that variant; one that
outlives its time is killed with its children, and the error stands where the figures would.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from .environment import REPOSITORY, scrub

CACHE_VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "CODA_CACHE_DIR",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One process's work.

    Attributes:
        suite: "layer", "llama", "layer_train", "model_train", "kernels" or "compile".
        size: name of the shape, a key of the suite's table.
        length: rows M (layers, kernels) or tokens (llama, model_train, compile).
        backend: torch.compile backend measured as ours; in suite "compile" the backend measured.
        rounds: samples per variant.
        norm: "hf" or "torch", how the layer writes its RMSNorm.
        ceiling: path of the hand-composed layer, or None.
        block: which block suite "kernels" measures.
        options: of our backend in that suite.
        seconds: time the process has.
        optimizer: whether a step of "model_train" ends with the optimizer's.
        without: patterns that a variant each of ours in "model_train" has disabled.
        skip: variants left out, with the reason.
    """

    suite: str
    size: str
    length: int
    backend: str = "coda"
    rounds: int = 25
    norm: str = "hf"
    ceiling: str | None = None
    block: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 240.0
    optimizer: bool = False
    without: tuple[str, ...] = ()
    skip: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Files:
    """The files through which the runner and a job's process speak."""

    folder: Path

    @property
    def order(self) -> Path:
        """The job, as JSON."""
        return self.folder / "order.json"

    @property
    def result(self) -> Path:
        """What the suite returned, as JSON; missing until it is complete."""
        return self.folder / "result.json"

    @property
    def progress(self) -> Path:
        """The variant in preparation, or nothing."""
        return self.folder / "progress"


def _wait(process: subprocess.Popen, timeout_s: float) -> str | None:
    """None if `process` ends well in time, else what happened; a late one is killed with its
    children.
    """
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"killed after {timeout_s:.0f} s"
    return None if code == 0 else f"exit status {code}"


def last_line(log: Path, start: int) -> str:
    """The last line that the process wrote after byte `start`: for a traceback, the exception."""
    with log.open("rb") as stream:
        stream.seek(start)
        lines = stream.read().decode(errors="replace").strip().splitlines()
    return scrub(lines[-1])[:600] if lines else ""


def run(job: Job, log: Path, timeout_s: float, caches: Path | None = None) -> dict:
    """The result of `job`, or ``{"error": text}``.

    Args:
        job: the work.
        log: file to which everything the process prints is appended.
        timeout_s: seconds for all attempts together.
        caches: folder under which all compile caches go; None leaves the user's.
    """
    deadline = time.monotonic() + timeout_s
    environment = dict(os.environ)
    if caches is not None:
        environment |= {variable: str(caches / variable.lower()) for variable in CACHE_VARIABLES}
    while True:
        with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
            files, start = Files(Path(folder)), output.tell()
            left = max(deadline - time.monotonic(), 1)
            order = dataclasses.replace(job, seconds=left)
            files.order.write_text(json.dumps(dataclasses.asdict(order)))
            happened = _wait(_start(folder, output, environment), left)
            if happened is None:
                return json.loads(files.result.read_text())
            culprit = files.progress.read_text() if files.progress.exists() else ""
        error = f"{happened}: {last_line(log, start)}"
        if not culprit or time.monotonic() >= deadline:
            return {"error": f"{error} (while preparing {culprit})" if culprit else error}
        job = dataclasses.replace(job, skip={**job.skip, culprit: error})


def _start(folder: str, output: IO[bytes], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.job", folder],
        cwd=REPOSITORY,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
