# SPDX-License-Identifier: Apache-2.0
"""Print how far training is from eager's where a module writes to what its backward pass needs.

Usage: python tools/writes.py, for the table of docs/internals/writes.md
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from zoo.written import ALL, step  # type: ignore[import-not-found]


def off(name: str, backend: str) -> float:
    """The largest difference of a step from eager's, relative to each tensor's largest element."""
    torch._dynamo.reset()
    want = step(name, lambda model: model)
    have = step(name, lambda model: torch.compile(model, backend=backend))
    pairs = zip(have, want, strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).item() for a, b in pairs)


def main() -> None:
    """Print the table."""
    print(f"torch {torch.__version__}\n\n| program | Inductor | coda |\n| --- | --- | --- |")
    for name, kind in ALL.items():
        text = " ".join((kind.__doc__ or "").split()).rstrip(".")
        print(f"| {text} | {off(name, 'inductor'):.0e} | {off(name, 'coda'):.0e} |", flush=True)


if __name__ == "__main__":
    main()
