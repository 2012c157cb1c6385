"""What fires in each model family, as the table of ``docs/models.md``.

Compiles tiny models of ``tests/models/families.py`` on the CPU, forward and backward, and compares
with eager. Usage: python3 tools/model_table.py [FAMILY ...] > docs/models.md
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "models")]

FAMILIES: Any = importlib.import_module("families").FAMILIES
Harness: Any = importlib.import_module("harness").Harness

LAYERS = 2
NORMS = ("rms_norm", "layer_norm")
TEXT = """# Models

What fires in tiny models of {layers} layers (transformers {version}, float32, on a CPU, where no
gate decides; `python3 tools/model_table.py > docs/models.md` makes this page again). Every row
agrees with eager, forward and backward, to rounding.

*norms*: deferred, of those recognized. *gates*: pairs of GEMMs that meet in one tile. *masks*:
attention masks that are proven to be SDPA's own, so that it runs flash attention. *fused*: GEMMs of
the forward pass that absorbed something, of all. *training*: GEMMs of forward and backward that
did, weight gradients included in the total. What is missing is said in the last column.

{table}
"""


def main() -> None:
    """Print the page; progress goes to stderr."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for family in sys.argv[1:] or FAMILIES:
        print(family, file=sys.stderr, flush=True)
        rows.append(row(family))
    heads = ["family", "norms", "gates", "masks", "fused", "training", "norms that stay, and why"]
    table = tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)
    page = TEXT.format(layers=LAYERS, version=transformers.__version__, table=table)
    print(page, end="")


def row(family: str) -> list[str]:
    """One line of the table.

    Raises:
        AssertionError: the family does not agree with eager.
    """
    torch.manual_seed(0)
    model, call, inputs = FAMILIES[family](LAYERS)
    run = functools.partial(call, model.eval())
    forward, backward = Harness(), Harness()
    ours = forward.run(run, *inputs)
    assert _close(ours, run(*inputs)), f"{family}: forward"
    gradients = []
    for step in (functools.partial(backward.train, run), run):
        model.zero_grad()
        step(*inputs).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    flat = [torch.cat([g.flatten() for g in group]) for group in gradients]
    assert _close(*flat), f"{family}: backward"
    deferred = sum(forward.counts[norm] for norm in NORMS)
    misses = [m for m in forward.report.near_misses if "norm at" in m]
    pairs = sum(site.program.paired for site in forward.fused)
    return [
        family,
        f"{deferred} of {deferred + len(misses)}",
        str(pairs or ""),
        str(forward.counts["constant_mask"] or ""),
        _fraction(forward),
        _fraction(backward),
        _reasons(misses),
    ]


def _fraction(harness: Any) -> str:
    return f"{len(harness.fused)} of {len(harness.report.sites)}"


def _close(ours: torch.Tensor, eager: torch.Tensor) -> bool:
    return bool((ours - eager).norm() <= 1e-5 * eager.norm())


def _reasons(misses: list[str]) -> str:
    """Each reason once, with how often; names of nodes left out."""
    counts: dict[str, int] = {}
    for miss in misses:
        reason = miss.split(": ", 1)[1].split(":")[0]
        reason = re.sub(r"^\w+ \(([\w.]+)\)", r"\1", reason)
        reason = re.sub(r"^view_?\d* ", "a view ", reason)
        counts[reason] = counts.get(reason, 0) + 1
    return "; ".join(f"{times} x {reason}" for reason, times in counts.items())


if __name__ == "__main__":
    main()
