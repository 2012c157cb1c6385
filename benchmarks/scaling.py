# SPDX-License-Identifier: Apache-2.0
"""What of a gain measured on two GPUs is left on more of them: computed, not measured.

    python -m benchmarks.scaling benchmarks/results/h200x2_distributed.json

The collectives of a step S take T ms, by profile, and the other kernels P: E = S - P of the
collectives is hidden by nothing, and C = S - E is what computing takes. Assumptions, for N ranks
that compute as much each:

- kernels that are no collectives take as long as on two GPUs, beside collectives as well;
- a ring sends (N - 1) / N of the bytes through each rank, twice as much as (2 - 1) / 2 at most, and
  its time is that over the bandwidth: collectives take f T, f = 2 (N - 1) / N * B_2 / B_N;
- what nothing hides on two GPUs, nothing hides on more (the first gather and the last reduction);
  the rest is hidden as long as computing takes longer.

So a step takes C + f E + max(0, f (T - E) - C). T and E are those of the variant where they are
least, for both: in a profile, a collective also waits for the other rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tabulate import tabulate

#: Name -> (ranks, bandwidth of a rank over that between two GPUs of the measured host, B_N / B_2).
#: NVLink is assumed to give eight ranks of a host what it gives two; between hosts, a network card
#: of 400 Gbit/s for each GPU gives 50 of the 250 GB/s that were measured.
WORLDS = {"8 GPUs, NVLink": (8, 1.0), "64 GPUs, 400 Gbit/s each": (64, 0.2)}
#: The gain is the first one's time over the second one's.
VARIANTS = ("compile", "coda")


def step_ms(
    computing: float, collectives: float, open_: float, ranks: int, bandwidth: float
) -> float:
    """Milliseconds of a step on so many ranks, as the module says.

    Args:
        computing: C, ms of kernels that are no collectives.
        collectives: T, ms of collectives on two GPUs.
        open_: E, ms of these that nothing hides.
        ranks: N.
        bandwidth: B_N / B_2.
    """
    factor = 2 * (ranks - 1) / ranks / bandwidth
    return computing + factor * open_ + max(0.0, factor * (collectives - open_) - computing)


def rows(cases: dict[str, dict]) -> list[list]:
    """A row a case where each rank has a batch of its own: its name, parts of torch.compile's step,
    the gain measured, those computed."""
    found = []
    for name, case in cases.items():
        if name.startswith("tensor"):  # more ranks would compute less each
            continue
        profile = case["profile"]
        measured = {v: case["variants"][v]["median_ms"] for v in VARIANTS}
        collectives = min(profile[v]["collectives_us"] / 1e3 for v in VARIANTS)
        others = {
            v: (profile[v]["total_us"] - profile[v]["collectives_us"]) / 1e3 for v in VARIANTS
        }
        open_ = min(collectives, *(max(measured[v] - others[v], 0.0) for v in VARIANTS))
        computing = {v: measured[v] - open_ for v in VARIANTS}
        theirs, ours = VARIANTS
        row = [name, computing[theirs], collectives, open_, measured[theirs]]
        row.append(measured[theirs] / measured[ours])
        for ranks, bandwidth in WORLDS.values():
            times = {
                v: step_ms(computing[v], collectives, open_, ranks, bandwidth) for v in VARIANTS
            }
            row.append(times[theirs] / times[ours])
        found.append(row)
    return found


def main() -> None:
    """Print the table of docs/distributed.md."""
    cases = json.loads(Path(sys.argv[1]).read_text())["distributed"]
    heads = ["torch.compile, ms", "computing", "collectives", "not hidden", "step"]
    heads += ["gain, 2 GPUs", *WORLDS]
    print(
        tabulate(rows(cases), heads, tablefmt="github", floatfmt=("", *[".1f"] * 4, *[".3f"] * 3))
    )


if __name__ == "__main__":
    main()
