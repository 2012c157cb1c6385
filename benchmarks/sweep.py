# SPDX-License-Identifier: Apache-2.0
"""Write the table that ships for a GPU model, of what was measured on it.

    python benchmarks/sweep.py FILE [FILE ...] coda_inductor/select/tables/NAME.json

A file is one that ``python -m coda_inductor tune`` keeps (its last line says where). No GPU is
needed.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coda_inductor.gpu import H100
from coda_inductor.select.figures import Figures, to_row
from coda_inductor.select.measurements import sites_in

#: Configs of a site that ship, and the spread from which on a site does not: something ran beside.
_BEST, _CALM = 4, 0.03


def ship(sources: Sequence[Path], target: Path) -> None:
    """Write a table of the measurements of ``sources`` to ``target``, with the constants that stand
    there, or those of an H100."""
    first = json.loads(sources[0].read_text())
    measured = {key: found for source in sources for key, found in sites_in(source).items()}
    measured = {key: found for key, found in measured.items() if found.spread <= _CALM}
    known = json.loads((target if target.exists() else H100.sites).read_text())
    data = {"device": first["gpu"], "constants": known["constants"]}
    data |= {name: first[name] for name in ("processors", "versions")}
    target.write_text(_pretty(data, measured))
    print(f"wrote {target}: {len(measured)} sites")


def _pretty(data: dict, measured: Mapping[str, Figures]) -> str:
    """JSON with one measurement a line; of a site the few best configs."""
    lines = [f'"{key}": {json.dumps(value)}' for key, value in data.items()]
    rows = ",\n  ".join(json.dumps(_shipped(*site)) for site in sorted(measured.items()))
    return "{\n " + ",\n ".join([*lines, f'"sites": [\n  {rows}\n ]']) + "\n}\n"


def _shipped(key: str, found: Figures) -> dict:
    best = dict(sorted(found.us.items(), key=lambda item: item[1])[:_BEST])
    return to_row(key, replace(found, us=best, failed={}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    ship(arguments.sources, arguments.target)
