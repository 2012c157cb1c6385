# SPDX-License-Identifier: Apache-2.0
"""The text that ``train.py`` trains on, as rows of byte tokens: nothing is downloaded.

It is this repository's licence and Markdown, then the language reference and the top-level modules
of Python's own standard library: a few megabytes, the same for everyone with this commit and this
Python. One row in 16 is held out.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = 16
EVALUATION_BATCHES = 20


def corpus() -> tuple[bytes, dict]:
    """The text, and what a results file says about it.

    The page that ``train_report.py`` writes is left out: it would change what it reports on.
    """
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    repository = [ROOT / "LICENSE", *(page for page in pages if page.name != "training.md")]
    library = Path(sysconfig.get_path("stdlib"))
    python = [library / "pydoc_data" / "topics.py", *sorted(library.glob("*.py"))]
    files = [path for path in [*repository, *python] if path.is_file()]
    text = b"\n".join(path.read_bytes() for path in files)
    return text, {
        "what": "this repository's LICENSE and Markdown; Python's language reference "
        "(pydoc_data/topics.py) and top-level standard library modules",
        "files": len(files),
        "bytes": len(text),
        "sha256": hashlib.sha256(text).hexdigest(),
    }


def cut(text: bytes, length: int) -> tuple[Tensor, Tensor]:
    """Rows of ``length`` bytes, uint8 on the CPU: those to train on, those held out."""
    whole = len(text) // length * length
    rows = torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).view(-1, length)
    held_out = torch.arange(len(rows)) % HELD_OUT == 0
    return rows[~held_out], rows[held_out]


@dataclass(frozen=True)
class Batches:
    """Batches (batch, length) of int64 tokens on ``device``, from (training, held-out) rows.

    ``reverse`` reverses the rows of each batch, which no mean over the batch can tell but by its
    rounding.
    """

    rows: tuple[Tensor, Tensor]
    batch: int
    device: str
    reverse: bool = False

    def train(self, seed: int, steps: int) -> Iterator[Tensor]:
        """``steps`` batches: shuffled epochs, in an order that ``seed`` alone decides."""
        shuffle = torch.Generator().manual_seed(seed)
        epochs = math.ceil(steps * self.batch / len(self.rows[0]))
        order = [torch.randperm(len(self.rows[0]), generator=shuffle) for _ in range(epochs)]
        for chosen in torch.cat(order).split(self.batch)[:steps]:
            yield self._batch(self.rows[0][chosen])

    def held_out(self) -> Iterator[Tensor]:
        """Full batches of held-out rows, the same ones in every run."""
        order = torch.randperm(len(self.rows[1]), generator=torch.Generator().manual_seed(0))
        full = len(order) // self.batch
        for chosen in order.split(self.batch)[: min(full, EVALUATION_BATCHES)]:
            yield self._batch(self.rows[1][chosen])

    def _batch(self, rows: Tensor) -> Tensor:
        return (rows.flip(0) if self.reverse else rows).to(self.device).long()
