# SPDX-License-Identifier: Apache-2.0
"""Measure what ships for a GPU model: the sites of Llama layers, and the model's constants.

    python benchmarks/sweep.py measure OUT.json [--seconds S]      # on the GPU; minutes
    python benchmarks/sweep.py fit OUT.json [OUT.json ...] coda_inductor/select/tables/NAME.json

``measure`` first times every legal config of the kinds of sites (``select/kinds.py``) at three
widths, then the sites of layers of all widths of the suite ``grid``, as traced by this torch, with
the likeliest configs, what these layers' plans still ask for, and the sites of layers in FP8; all
as ``python -m coda_inductor tune`` does. What was measured before (in the cache) is not measured
again, and what there is no time for is left out. ``fit`` needs no GPU: it fits, for each config,
the four constants of ``coda_inductor.select.model`` by weighted least squares, prints how far the
model's choices are from the measured best, and writes the table, with the measured sites.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from coda_inductor.select import model
from coda_inductor.select.device import H100, gpu_of
from coda_inductor.select.figures import Figures, key_of, to_row
from coda_inductor.select.kinds import B_MAJOR, TERMS, family, kinds
from coda_inductor.select.site import Site
from coda_inductor.select.store import as_text, merged, store_of
from coda_inductor.tune.rank import MANY
from coda_inductor.tune.tuner import Tuner

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import layer
from benchmarks.cases import RECIPES
from benchmarks.layer import HALF
from benchmarks.sites import asked, layers

#: Widths: the residual stream, the MLP, one of k and v, and q, k and v together.
SIZES = {
    "1B": (2048, 8192, 512, 3072),
    "8B": (4096, 14336, 1024, 6144),
    "70B": (8192, 28672, 1024, 10240),
}
ROWS = {"1B": (512, 2048, 8192), "8B": (512, 2048, 8192), "70B": (8192,)}
TRAINING_ROWS = {"1B": (2048, 8192), "8B": (8192,), "70B": (8192,)}
VOCABULARY = 128256
HEADS = ((VOCABULARY, 2048), (VOCABULARY, 4096), (50304, 1280))
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
#: The same in FP8, by all recipes.
FP8_LAYERS = {8192: ("8B", "1B"), 4096: ("8B",), 2048: ("8B",)}
#: How often the layers are planned: what one plan's sites take decides about the next one's.
PLANS = 3
#: Configs of a site that ship, and the spread from which on a site does not: something ran beside.
_BEST, _CALM = 4, 0.03


def shapes() -> list[tuple[str, int, int, int]]:
    """(kind, M, N, K) of every site, each once. K is the sum over the terms of a joined kind."""
    found = {}
    for size, (d, f, kv, qkv) in SIZES.items():
        sites = [
            ("rms_partial", d, d),  # attention output
            ("swiglu", f, d),  # gate and up
            ("rms_partial", d, f),  # down
            ("scale", d, d),  # q
            ("scale", kv, d),  # k, v
            *(("rotary", n, d) for n in (d, kv)),  # q, k
            ("scale", f, d),  # gate alone
            ("dswiglu", f, d),  # gradient of the down projection's input
        ]
        training = [
            ("swiglu_train", f, d),  # gate and up, both kept
            ("act_bwd", f, d),  # gradient of an ungated down projection's input
            ("norm_bwd", d, qkv),  # gradient of the attention norm's input
            ("norm_bwd_joined", d, 2 * f),  # gradient of the MLP norm's input
        ]
        if size == "1B":
            training.append(("norm_bwd", d, VOCABULARY))  # gradient of the last norm's input
        for m in ROWS[size]:
            found.update(dict.fromkeys((kind, m, n, k) for kind, n, k in sites))
        for m in TRAINING_ROWS[size]:
            found.update(dict.fromkeys((kind, m, n, k) for kind, n, k in training))
    found.update(dict.fromkeys(("logsumexp", 8192, n, k) for n, k in HEADS))
    return list(found)


def sites() -> list[Site]:
    """The kinds' sites at :func:`shapes`."""
    programs = kinds()
    return [
        Site(programs[kind], m, n, k, TERMS[kind], b_major=B_MAJOR[kind], name=kind)
        for kind, m, n, k in shapes()
    ]


def measure(
    out: Path,
    seconds: float,
    only: str,
    cases: Mapping[int, Sequence[str]] = LAYERS,
    most: int = MANY // 2,
) -> None:
    """Measure for at most so many seconds, and write everything that is known of this GPU. ``only``
    "kinds", "layers" or "fp8"; "" for all. ``cases``: the sizes of layers for each number of rows;
    ``most``: configs of each of their sites."""
    device = torch.device("cuda", torch.cuda.current_device())
    store, start = store_of(gpu_of(device)), time.monotonic()

    def batch(what: str, wanted: list[Site], most: int | None) -> None:
        left = seconds - (time.monotonic() - start)
        if left < 5:
            print(f"no time for {what}")
            return
        tuner = Tuner(store, device, left, most)
        tuner.measure(wanted)
        tuner.close()
        done = len(wanted) - len(tuner.left)
        print(f"{what}: {done} of {len(wanted)}, {time.monotonic() - start:.0f} s", flush=True)
        out.write_text(as_text(store.gpu, store.own(), store.device))

    if only in ("", "kinds"):
        batch("kinds", sites(), None)
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


def rows(measured: Mapping[str, Figures]) -> list[dict]:
    """What of the measurements is of a kind: its row in the table."""
    found = []
    for key, figures in measured.items():
        kind, (_, size, *_) = figures.kind, key.split(" ")
        if not kind or "copied" in key:
            continue
        n, k = map(int, size.split("x")[1:])
        products = len(kinds()[kind].accs) * TERMS[kind]
        us = {**figures.us, "cublas": round(figures.plain / products, 2)}
        found.append({"kind": kind, "m": figures.m, "n": n, "k": k, "us": us})
    return found


def fit(sources: Sequence[Path], target: Path, lender: str = "") -> None:
    """Fit the model to the measurements of ``sources`` and write a table of both to ``target``,
    with the constants that are not fitted as they stand there, or for an H100. ``lender`` names the
    table whose model is used instead, where too few kinds were measured for one of its own.
    ``h100_sweep.json``, from before sites were kept, has rows of kinds, nothing of the device."""
    texts = [source.read_text() for source in sources]
    first, measured = json.loads(texts[0]), merged(texts)
    measured = {key: found for key, found in measured.items() if found.spread <= _CALM}
    known = json.loads((target if target.exists() else H100.table).read_text())
    constants, kinds_only = known["constants"], "shapes" in first
    if not kinds_only:
        constants |= {"bytes_per_us": first["device"]["bytes_per_us"]}
    data = {
        "device": first["device"] if kinds_only else first["gpu"],
        "constants": constants,
        "processors": first["processors"],
        "versions": f"torch {first['torch']}" if kinds_only else first["versions"],
    }
    if lender:
        data["model_of"] = lender
    else:
        data["shapes"] = first["shapes"] if kinds_only else rows(measured)
        groups: dict[str, list[dict]] = {"single": [], "paired": [], "logsumexp": []}
        for row in data["shapes"]:
            groups[family(kinds()[row["kind"]])].append(row)
        data["models"] = {g: _models(g, found, data["processors"]) for g, found in groups.items()}
        data["cublas"] = _cublas_model(data)
        _report_choices(data)
    target.write_text(_pretty(data, measured))
    print(f"wrote {target}: {len(measured)} sites")


def _models(group: str, rows: list[dict], processors: int) -> dict[str, list[float]]:
    """For each config: step, tile, per_byte, fixed >= 0 of least squared relative error."""
    models = {}
    for name in sorted({name for row in rows for name in row["us"]} - {"cublas"}):
        features, us = [], []
        for row in rows:
            if name in row["us"]:
                waves = model.waves(group, name, row["m"], row["n"], processors)
                moved = model.traffic(kinds()[row["kind"]], row["n"])
                features.append([waves * row["k"], waves, waves * moved, 1.0])
                us.append(row["us"][name])
        models[name] = _least_squares(np.array(features), np.array(us))
    return models


def _least_squares(features: np.ndarray, us: np.ndarray) -> list[float]:
    """Constants >= 0: the most negative one is dropped until none is."""
    scaled = features / us[:, None]
    active = [i for i in range(features.shape[1]) if np.abs(scaled[:, i]).max() > 0]
    while True:
        solution, *_ = np.linalg.lstsq(scaled[:, active], np.ones(len(us)), rcond=None)
        if (solution >= 0).all():
            break
        active.pop(int(solution.argmin()))
    constants = [0.0] * features.shape[1]
    for index, value in zip(active, solution, strict=True):
        constants[index] = float(f"{value:.5g}")
    return constants


def _cublas_model(data: dict) -> dict[str, float]:
    """The ratio to our best config on large GEMMs, and the line that small ones lie on."""
    ratios, features, us = [], [], []
    for row in data["shapes"]:
        gmacs = row["m"] * row["n"] * row["k"] // TERMS[row["kind"]] / 1e9
        if gmacs > model.SMALL_GMACS:
            if row["kind"] == "scale":
                best = min(time for name, time in row["us"].items() if name != "cublas")
                ratios.append(row["us"]["cublas"] / best)
        else:
            features.append([1.0, gmacs])
            us.append(row["us"]["cublas"])
    fixed, slope = _least_squares(np.array(features), np.array(us))
    ratio = float(f"{statistics.median(ratios):.4g}")
    return {"ratio": ratio, "fixed": fixed, "us_per_gmac": slope}


def _report_choices(data: dict) -> None:
    """How good the model is on the shapes it was fitted to, without their measurements."""
    errors: dict[str, list[float]] = {}
    for row in data["shapes"]:
        program = kinds()[row["kind"]]
        group = family(program)
        at = (row["m"], row["n"], row["k"])
        times = {name: us for name, us in row["us"].items() if name != "cublas"}
        moved = model.traffic(program, row["n"])
        expected = {name: model.modelled(data, group, name, *at, moved) for name in times}
        chosen = min(expected, key=expected.get)
        cublas = model.modelled_cublas(data, row["m"], row["n"], row["k"] // TERMS[row["kind"]])
        errors.setdefault("time over best, chosen by the model", []).append(
            times[chosen] / min(times.values()) - 1
        )
        errors.setdefault("error of the modelled time", []).append(
            abs(expected[chosen] / times[chosen] - 1)
        )
        errors.setdefault("error of cuBLAS's time", []).append(
            abs(cublas / row["us"]["cublas"] - 1)
        )
    for what, values in errors.items():
        print(f"{what}: mean {statistics.mean(values):.1%}, worst {max(values):.1%}")


def _pretty(data: dict, measured: Mapping[str, Figures]) -> str:
    """JSON with one config and one measurement a line; of a site the few best configs."""
    heads = [key for key in data if key not in ("models", "shapes")]
    lines = [f'"{key}": {json.dumps(data[key])}' for key in heads]
    families = []
    for group, models in data.get("models", {}).items():
        constants = ",\n   ".join(f'"{name}": {json.dumps(c)}' for name, c in models.items())
        families.append(f'"{group}": {{\n   {constants}\n  }}')
    if families:
        lines.append('"models": {\n  ' + ",\n  ".join(families) + "\n }")
    lists = {"shapes": data["shapes"]} if "shapes" in data else {}
    lists["sites"] = [_shipped(*site) for site in sorted(measured.items())]
    for name, found in lists.items():
        text = ",\n  ".join(json.dumps(row) for row in found)
        lines.append(f'"{name}": [\n  {text}\n ]')
    return "{\n " + ",\n ".join(lines) + "\n}\n"


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
    measuring.add_argument("--only", choices=("kinds", "layers", "fp8"), default="")
    measuring.add_argument("--rows", default="", help="of the layers, e.g. 8192,4096; default all")
    measuring.add_argument("--sizes", default="", help="of the layers, e.g. 1B,8B; default all")
    measuring.add_argument("--most", type=int, default=MANY // 2, help="configs of their sites")
    fitting = commands.add_parser("fit")
    fitting.add_argument("sources", type=Path, nargs="+")
    fitting.add_argument("target", type=Path)
    fitting.add_argument(
        "--model-of", default="", metavar="TABLE", help="borrow its model, fit none"
    )
    arguments = parser.parse_args()
    if arguments.command == "measure":
        try:
            cases = _cases(arguments.rows, arguments.sizes)
        except ValueError as error:
            parser.error(f"--rows, --sizes: {error}")
        measure(arguments.out, arguments.seconds, arguments.only, cases, arguments.most)
    else:
        fit(arguments.sources, arguments.target, arguments.model_of)


if __name__ == "__main__":
    main()
