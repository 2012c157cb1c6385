# SPDX-License-Identifier: Apache-2.0
"""Prefill: the logits behind a long prompt, under torch.compile and under coda.

Usage: python examples/prefill.py
"""

from __future__ import annotations

import functools

import torch
from beside import BACKENDS, llama, show, tokens


def main() -> None:
    """One forward pass without gradients; only the last token's logits are computed."""
    model, prompt = llama().eval(), tokens()
    for backend in BACKENDS:
        compiled = torch.compile(model, backend=backend)

        with torch.no_grad():
            show(backend, functools.partial(compiled, prompt, logits_to_keep=1))


if __name__ == "__main__":
    main()
