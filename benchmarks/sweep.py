# SPDX-License-Identifier: Apache-2.0
"""Time every legal kernel config against cuBLAS, and fit the cost model that is shipped.

    python benchmarks/sweep.py measure OUT.json [KIND ...]      # on the GPU; minutes
    python benchmarks/sweep.py fit OUT.json coda_inductor/select/tables/h100.json

``measure`` times, for each site of a Llama layer (three sizes, several M), every legal config of
its kind and the same products through torch.mm, interleaved, and keeps the medians. Weights rotate,
so that small ones are not read from the L2 cache. Named kinds are measured alone, and what OUT.json
holds of the others stays. ``fit`` needs no GPU: it fits, for each config, the four constants of
``coda_inductor.select.model`` by weighted least squares, and prints how far the model's choices are
from the measured best.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch

from coda_inductor.select import model
from coda_inductor.select.config import legal_configs
from coda_inductor.select.kinds import B_MAJOR, TERMS, family, kinds

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
ROUNDS = 11
_COLD_BYTES = 128 * 2**20  # more than twice the L2 cache


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


def compile_all(names: list[str]) -> None:
    """Compile all kernels of the kinds called ``names`` in parallel."""
    from coda_inductor.runtime.pool import KernelRequest, wait

    requests = [
        KernelRequest(
            kinds()[name].to_json(),
            str(config),
            B_MAJOR[name],
            joined="straight" if TERMS[name] > 1 else "",
        )
        for name in names
        for config in legal_configs(kinds()[name])
    ]
    failed = {r: error for r, error in wait(requests, 400).items() if error}
    for request, error in failed.items():
        print("cannot compile", request.config, error)


def measure_shape(kind: str, m: int, n: int, k: int) -> dict:
    """Median microseconds of every config and of cuBLAS (one product of pairs and of sums)."""
    from coda_inductor.runtime.launch import kernel
    from coda_inductor.runtime.op import _allocate

    program = kinds()[kind]
    products = len(program.accs) * TERMS[kind]
    copies = max(2, min(16, -(-_COLD_BYTES // (2 * n * k * len(program.accs)))))
    as_, weights, operands = _inputs(kind, m, n, k, copies)
    runs = {}
    for config in legal_configs(program):
        entry = kernel(program.to_json(), str(config))
        outputs = _allocate(program, config, as_[0], weights[0])
        runs[str(config)] = lambda bs, entry=entry, outputs=outputs: entry.launch(
            as_, bs, operands, outputs
        )
    product = as_[0].new_empty(m, n)
    lefts = as_ * len(program.accs)
    runs["cublas"] = lambda bs: [
        torch.mm(a, b, out=product) for a, b in zip(lefts, bs, strict=True)
    ]
    times = {name: [] for name in runs}
    for round_ in range(ROUNDS + 2):
        torch.cuda._sleep(3_000_000)  # the queue fills meanwhile: no gaps between kernels
        events = []
        for index, (name, run) in enumerate(runs.items()):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(weights[(round_ * len(runs) + index) % copies])
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        if round_ >= 2:
            for name, start, end in events:
                times[name].append(1e3 * start.elapsed_time(end))
    us = {name: round(statistics.median(values), 2) for name, values in times.items()}
    us["cublas"] = round(us["cublas"] / products, 2)
    return {"kind": kind, "m": m, "n": n, "k": k, "us": us}


def _inputs(kind: str, m: int, n: int, k: int, copies: int):
    """Random left operands, ``copies`` of the weights (each (K, N)), and the operands. They lie in
    memory in their order, so that one variant of a kernel serves."""
    program, terms = kinds()[kind], TERMS[kind]

    def randn(*shape: int, dtype: str) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(getattr(torch, dtype))

    def weight() -> torch.Tensor:
        if B_MAJOR[kind] == "k":
            return randn(n, k // terms, dtype=program.in_dtype).t()
        return randn(k // terms, n, dtype=program.in_dtype)

    def by_address(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return sorted(tensors, key=torch.Tensor.data_ptr)

    sizes = {"tile": (m, n), "row": (n,), "col": (m,)}
    operands = [randn(*sizes[o.kind], dtype=o.dtype) for o in program.operands]
    products = terms * len(program.accs)
    weights = [by_address([weight() for _ in range(products)]) for _ in range(copies)]
    as_ = by_address([randn(m, k // terms, dtype=program.in_dtype) for _ in range(terms)])
    return as_, weights, operands


def measure(path: Path, names: list[str]) -> None:
    """Measure all shapes of the kinds called ``names`` (none: of all) and write them to ``path``,
    in place of what it holds of them."""
    names = names or list(kinds())
    compile_all(names)
    properties = torch.cuda.get_device_properties(0)
    data = {"shapes": []}
    if path.exists():
        data = json.loads(path.read_text())
    data |= {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
    }
    data["shapes"] = [row for row in data["shapes"] if row["kind"] not in names]
    for shape in shapes():
        if shape[0] in names:
            row = measure_shape(*shape)
            data["shapes"].append(row)
            path.write_text(json.dumps(data))
            report(row)


def report(row: dict) -> None:
    """One line: the best configs and how they compare with cuBLAS."""
    cublas = row["us"]["cublas"] * len(kinds()[row["kind"]].accs) * TERMS[row["kind"]]
    configs = sorted((us, name) for name, us in row["us"].items() if name != "cublas")
    best = ", ".join(f"{name} {us:.0f}" for us, name in configs[:3])
    print(
        f"{row['kind']:<15} M={row['m']:<5} N={row['n']:<6} K={row['k']:<6}"
        f" cublas {cublas:8.1f} us  ratio {configs[0][0] / cublas:.3f}  {best}",
        flush=True,
    )


def fit(source: Path, target: Path) -> None:
    """Fit the model to the measurements of ``source`` and write both to ``target``."""
    data = json.loads(source.read_text())
    rows: dict[str, list[dict]] = {"single": [], "paired": [], "logsumexp": []}
    for row in data["shapes"]:
        rows[family(kinds()[row["kind"]])].append(row)
    data["models"] = {g: _models(g, found, data["processors"]) for g, found in rows.items()}
    data["cublas"] = _cublas_model(data)
    target.write_text(_pretty(data))
    _report_choices(data)
    print(f"wrote {target}")


def _models(group: str, rows: list[dict], processors: int) -> dict[str, list[float]]:
    """For each config: step, tile, per_byte, fixed >= 0 of least squared relative error."""
    models = {}
    for name in sorted({name for row in rows for name in row["us"]} - {"cublas"}):
        features, us = [], []
        for row in rows:
            if name in row["us"]:
                waves = model.waves(group, name, row["m"], row["n"], processors)
                moved = model.traffic(kinds()[row["kind"]])
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
        model = {
            name: model.modelled(data, group, name, *at, model.traffic(program)) for name in times
        }
        chosen = min(model, key=model.get)
        cublas = model.modelled_cublas(data, row["m"], row["n"], row["k"] // TERMS[row["kind"]])
        errors.setdefault("time over best, chosen by the model", []).append(
            times[chosen] / min(times.values()) - 1
        )
        errors.setdefault("error of the modelled time", []).append(
            abs(model[chosen] / times[chosen] - 1)
        )
        errors.setdefault("error of cuBLAS's time", []).append(
            abs(cublas / row["us"]["cublas"] - 1)
        )
    for what, values in errors.items():
        print(f"{what}: mean {statistics.mean(values):.1%}, worst {max(values):.1%}")


def _pretty(data: dict) -> str:
    """JSON with one config and one measurement a line."""
    lines = [f'"{key}": {json.dumps(data[key])}' for key in ("device", "processors", "torch")]
    lines.append(f'"cublas": {json.dumps(data["cublas"])}')
    families = []
    for group, models in data["models"].items():
        rows = ",\n   ".join(f'"{name}": {json.dumps(c)}' for name, c in models.items())
        families.append(f'"{group}": {{\n   {rows}\n  }}')
    lines.append('"models": {\n  ' + ",\n  ".join(families) + "\n }")
    rows = ",\n  ".join(json.dumps(row) for row in data["shapes"])
    lines.append(f'"shapes": [\n  {rows}\n ]')
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(kinds()))
    fitting = commands.add_parser("fit")
    fitting.add_argument("source", type=Path)
    fitting.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        unknown = set(arguments.kinds) - set(kinds())
        if unknown:
            parser.error(f"unknown kind {min(unknown)!r}; known: {', '.join(kinds())}")
        measure(arguments.out, arguments.kinds)
    else:
        fit(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
