# SPDX-License-Identifier: Apache-2.0
"""Measure what ships for a GPU model: the sites of Llama layers.

    python benchmarks/sweep.py measure OUT.json [--seconds S]      # on the GPU; minutes
    python benchmarks/sweep.py ship OUT.json [OUT.json ...] coda_inductor/select/tables/NAME.json

``measure`` times the sites of layers of all widths of the suite ``grid``, as traced by this torch,
with the likeliest configs, what these layers' plans still ask for, and the sites of layers in FP8;
all as ``python -m coda_inductor tune`` does. What was measured before (in the cache) is not
measured again, and what there is no time for is left out. ``ship`` needs no GPU: it writes the
table.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from coda_inductor.select.choice import MANY
from coda_inductor.select.device import H100, gpu_of
from coda_inductor.select.figures import Figures, key_of, to_row
from coda_inductor.select.site import Site
from coda_inductor.select.store import as_text, merged, store_of
from coda_inductor.tune.tuner import Tuner

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import layer
from benchmarks.layer import HALF
from benchmarks.sites import asked, layers

_ALL = ("1B", "3B", "8B", "13B", "32B", "70B")
#: Layers by their rows: those of the suite ``grid``, what the model says least about first.
LAYERS = {
    5000: _ALL,
    2048: _ALL,
    1000: ("1B", "8B", "32B"),
    512: _ALL,
    8192: _ALL,
    4096: _ALL,
    16384: ("1B", "3B"),
}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: The same in FP8, by all recipes.
FP8_LAYERS = {8192: ("8B", "1B"), 4096: ("8B",), 2048: ("8B",)}
#: How often the layers are planned: what one plan's sites take decides about the next one's.
PLANS = 3
#: Configs of a site that ship, and the spread from which on a site does not: something ran beside.
_BEST, _CALM = 4, 0.03


def measure(
    out: Path,
    seconds: float,
    only: str,
    cases: Mapping[int, Sequence[str]] = LAYERS,
    most: int = MANY // 2,
) -> None:
    """Measure for at most so many seconds, and write everything that is known of this GPU. ``only``
    "layers" or "fp8"; "" for both. ``cases``: the sizes of layers for each number of rows;
    ``most``: configs of each of their sites."""
    device = torch.device("cuda", torch.cuda.current_device())
    store, start = store_of(gpu_of(device)), time.monotonic()

    def batch(what: str, wanted: list[Site], most: int) -> None:
        left = seconds - (time.monotonic() - start)
        if left < 5:
            print(f"no time for {what}")
            return
        tuner = Tuner(store, device, left, most)
        tuner.measure(wanted)
        tuner.close()
        done = len(wanted) - len(tuner.left)
        print(f"{what}: {done} of {len(wanted)}, {time.monotonic() - start:.0f} s", flush=True)
        out.write_text(as_text(store.gpu, store.own()))

    for m, names in cases.items() if only in ("", "layers") else ():
        widths = [layer.SIZES[size] for size in names]
        batch(f"layers at {m} rows", layers(widths, [m], torch.bfloat16), most)
    for turn in range(PLANS) if only in ("", "layers") else ():
        batch(f"plans, time {turn + 1}", _asked(cases), most)
    for m, names in FP8_LAYERS.items() if only in ("", "fp8") else ():
        widths = [layer.SIZES[size] for size in names]
        found = {
            key_of(site): site
            for recipe in RECIPES
            for site in layers(widths, [m], torch.bfloat16, recipe)
        }
        batch(f"layers in FP8 at {m} rows", list(found.values()), MANY // 2)


def _asked(layers: Mapping[int, Sequence[str]]) -> list[Site]:
    """What the plans of all ``layers``, sizes by rows, still ask for, each once."""
    cases = [
        (layer.SIZES[size], m, torch.bfloat16) for m, names in layers.items() for size in names
    ]
    cases += [
        (layer.SIZES[size], m, torch.float16) for size, m in HALF if size in layers.get(m, ())
    ]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        min(12, len(os.sched_getaffinity(0))), spawn
    ) as pool:
        found = [site for sites in pool.map(asked, *zip(*cases, strict=True)) for site in sites]
    return list({key_of(site): site for site in found}.values())


def ship(sources: Sequence[Path], target: Path) -> None:
    """Write a table of the measurements of ``sources`` to ``target``, with the constants that stand
    there, or those of an H100."""
    texts = [source.read_text() for source in sources]
    first, measured = json.loads(texts[0]), merged(texts)
    measured = {key: found for key, found in measured.items() if found.spread <= _CALM}
    known = json.loads((target if target.exists() else H100.sites).read_text())
    data = {
        "device": first["gpu"],
        "constants": known["constants"],
        "processors": first["processors"],
        "versions": first["versions"],
    }
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


def _cases(rows: str, sizes: str) -> dict[int, list[str]]:
    """The layers of the ``rows`` and ``sizes`` that are named, separated by commas; "" for all.
    Raises ValueError for what no layer has."""
    known = {str(m): m for m in LAYERS}
    wanted, named = rows.split(",") if rows else list(known), sizes.split(",") if sizes else _ALL
    if unknown := sorted({*wanted} - {*known}) + sorted({*named} - {*_ALL}):
        have = f"rows {', '.join(known)}; sizes {', '.join(_ALL)}"
        raise ValueError(f"no layers of {', '.join(unknown)}; there are {have}")
    return {known[m]: [size for size in LAYERS[known[m]] if size in named] for m in wanted}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--seconds", type=float, default=900.0, help="at most")
    measuring.add_argument("--only", choices=("layers", "fp8"), default="")
    measuring.add_argument("--rows", default="", help="of the layers, e.g. 8192,4096; default all")
    measuring.add_argument("--sizes", default="", help="of the layers, e.g. 1B,8B; default all")
    measuring.add_argument("--most", type=int, default=MANY // 2, help="configs of their sites")
    shipping = commands.add_parser("ship")
    shipping.add_argument("sources", type=Path, nargs="+")
    shipping.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        try:
            cases = _cases(arguments.rows, arguments.sizes)
        except ValueError as error:
            parser.error(f"--rows, --sizes: {error}")
        measure(arguments.out, arguments.seconds, arguments.only, cases, arguments.most)
    else:
        ship(arguments.sources, arguments.target)


if __name__ == "__main__":
    main()
