# SPDX-License-Identifier: Apache-2.0
"""Train on packed documents: several in one row, told apart by ``position_ids`` alone.

transformers makes a mask of them (``use_cache=False``); coda skips the blocks that nobody reads.

Usage: python examples/packed.py
"""

from __future__ import annotations

import torch
from beside import BACKENDS, TOKENS, llama, show, tokens

DOCUMENTS = 8


def main() -> None:
    """Forward and backward; labels at the border of two documents are ignored."""
    model, row = llama(), tokens()
    length = TOKENS // DOCUMENTS
    positions = torch.arange(TOKENS, device=row.device)[None] % length
    labels = row.masked_fill(positions == 0, -100)
    for backend in BACKENDS:
        compiled = torch.compile(model, backend=backend)

        def step(compiled=compiled) -> None:
            compiled(row, position_ids=positions, labels=labels).loss.backward()
            model.zero_grad(set_to_none=True)

        show(backend, step)


if __name__ == "__main__":
    main()
