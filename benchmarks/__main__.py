# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m benchmarks --out DIR``, ``python -m benchmarks report FILE``, and
``python -m benchmarks grid --out DIR``, ``families`` or ``fp8`` (``grid_run``); ``python -m
benchmarks account`` (``account``).

Measuring writes into DIR, after every part: ``results.json``, ``tables.txt`` (the tables that are
also printed last), ``profiles.txt`` (kernels, and what our backend reports) and ``log.txt`` (all
that the processes printed).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import account, environment, grid_run, kernels, layer, llama, models, report, runner
from .blocks import BLOCKS
from .environment import REPOSITORY
from .runner import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIANTS = (
    *("eager", "gemms", "gemms_fused", "compile", "max_autotune", "coda", "ceiling", "liger"),
    *("liger_compile", "compile_checkpoint", "coda_checkpoint"),
)
SUITES = ("layer", "llama", "layer_train", "model_train", "kernels")
SUITE_SECONDS = 470.0


def _names(known: tuple[str, ...]):
    """An argparse type: a comma-separated list of names, each one of `known`."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown {', '.join(unknown)}; known: {', '.join(known)}"
            )
        return names

    return parse


def _lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the results")
    add(
        "--suite",
        type=_names(SUITES),
        default=list(SUITES),
        help=f"suites to run, of {','.join(SUITES)} (default: all)",
    )
    sizes = tuple(layer.SIZES)
    add(
        "--sizes",
        type=_names(sizes),
        default=["1B", "8B", "70B"],
        help=f"sizes of layers and kernels, of {','.join(sizes)} (default 1B,8B,70B)",
    )
    add("--rows", type=int, default=8192, help="rows M of layers and kernels (default 8192)")
    add("--norm", choices=tuple(layer.NORMS), default="hf", help="how the layer writes its RMSNorm")
    add(
        "--ceiling",
        type=Path,
        help="hand-composed layer to run beside ours; without it the column is left out",
    )
    add(
        "--models",
        type=_names(tuple(models.MODELS)),
        default=["1B"],
        help=f"models that train, of {','.join(models.MODELS)} (default 1B)",
    )
    add(
        "--blocks",
        type=_names(tuple(BLOCKS)),
        default=list(BLOCKS),
        help=f"blocks of suite kernels, of {','.join(BLOCKS)} (default: all)",
    )
    add(
        "--options",
        type=json.loads,
        default={},
        help="""options of our backend in suite kernels, as JSON, e.g. '{"gate": "always"}'""",
    )
    add("--llama", choices=tuple(llama.SHAPES), default="1B", help="shape of suite llama")
    add(
        "--tokens",
        type=_lengths,
        default=[512, 2048, 8192],
        help="prompt lengths (default 512,2048,8192)",
    )
    add(
        "--train-tokens",
        type=_lengths,
        default=[2048, 8192],
        help="sequence lengths of training (default 2048,8192)",
    )
    add("--optimizer", action="store_true", help="end each step of model_train with fused AdamW")
    add(
        "--without",
        type=lambda text: text.split(","),
        default=[],
        help="patterns; model_train then also measures ours without each, alone",
    )
    add(
        "--skip",
        type=_names(VARIANTS),
        default=[],
        help="variants to leave out, e.g. max_autotune, which takes longest to prepare",
    )
    add("--rounds", type=int, default=25, help="samples per variant (at most 12 for 70B)")
    add("--backend", default="coda", help="torch.compile backend measured as ours (default coda)")
    add("--timeout", type=float, default=240.0, help="seconds for one part (default 240)")
    add("--commit", help="measured commit, where the tree is a copy without .git")
    return parser


def _job(parsed: argparse.Namespace, suite: str, size: str, length: int, **fields: Any) -> Job:
    """A job with what every suite takes from the command line, and `fields`."""
    left_out = [name + ending for name in parsed.skip for ending in ("", kernels.STEP)]
    return Job(
        suite,
        size,
        length,
        backend=parsed.backend,
        rounds=min(parsed.rounds, 12) if size == "70B" else parsed.rounds,
        norm=parsed.norm,
        skip=dict.fromkeys(left_out, "left out by --skip"),
        **fields,
    )


def _layers(suite: str, options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    path = str(options.ceiling.resolve()) if options.ceiling else None
    for size in options.sizes:
        yield size, _job(options, suite, size, options.rows, ceiling=path)


def _llama(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    for tokens in options.tokens:
        yield str(tokens), _job(options, "llama", options.llama, tokens)


def _model_train(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    for model in options.models:
        for tokens in options.train_tokens:
            own = {"optimizer": options.optimizer, "without": options.without}
            job = _job(options, "model_train", model, tokens, **own)
            yield f"{model} {tokens}", job


def _kernels(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    for block in options.blocks:
        for size in options.sizes:
            own = {"block": block, "options": options.options}
            yield f"{block} {size}", _job(options, "kernels", size, options.rows, **own)


JOBS = {
    "layer": functools.partial(_layers, "layer"),
    "llama": _llama,
    "layer_train": functools.partial(_layers, "layer_train"),
    "model_train": _model_train,
    "kernels": _kernels,
}


def _suite(
    suite: str, options: argparse.Namespace, log: Path, deadline: float
) -> Iterator[tuple[str, dict]]:
    for name, job in JOBS[suite](options):
        yield name, runner.run(job, log, _left(options, deadline))


def _compile(options: argparse.Namespace, log: Path, deadline: float) -> Iterator[tuple[str, dict]]:
    for backend in dict.fromkeys(("inductor", options.backend)):
        with tempfile.TemporaryDirectory() as caches:
            runs = {}
            for state in ("cold", "warm"):
                job = Job("compile", options.llama, options.tokens[-1], backend=backend)
                runs[state] = runner.run(job, log, _left(options, deadline), Path(caches))
            yield backend, runs


def _left(options: argparse.Namespace, deadline: float) -> float:
    return min(options.timeout, deadline - time.monotonic())


def _save(results: dict, out: Path) -> None:
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "tables.txt").write_text(report.short(results) + "\n")
    (out / "profiles.txt").write_text(report.profiles(results))


def measure(arguments: list[str]) -> None:
    """Run the suites that `arguments` name; files and terminal as the module docstring says."""
    options = _parser().parse_args(arguments)
    if options.ceiling and not options.ceiling.is_file():
        _parser().error(
            f"--ceiling {options.ceiling.name}: no such file; correct it or leave it out"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "log.txt"
    results: dict = {"environment": environment.describe(arguments, options.commit)}
    for suite in (name for name in SUITES if name in options.suite):
        deadline = time.monotonic() + SUITE_SECONDS
        parts = {suite: _suite(suite, options, log, deadline)}
        if suite == "llama":
            # Compile times belong to it, but come last: they must not use up its time.
            parts["compile"] = _compile(options, log, deadline)
        for part, measured in parts.items():
            results[part] = {}
            for name, result in measured:
                results[part][name] = result
                _save(results, options.out)
                took = f"done in {result['seconds']:.0f} s" if "seconds" in result else "done"
                outcome = result.get("error", took)
                print(f"{part} {name}: {outcome}, log in {log.name}", flush=True)
    print("\n" + report.short(results))


def render(arguments: list[str]) -> None:
    """Render docs/benchmarks.md and its plots from results files of one machine."""
    parser = argparse.ArgumentParser("python -m benchmarks report", description=render.__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="results.json of one or more runs")
    parser.add_argument("--docs", type=Path, default=REPOSITORY / "docs", help="folder to write")
    options = parser.parse_args(arguments)
    from . import plots

    for path in plots.write(options.results, options.docs):
        print(path)


def main() -> None:
    """Dispatch on the first word."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["report"]:
        render(arguments[1:])
    elif arguments[:1] in (["grid"], ["families"], ["fp8"]):
        grid_run.main(arguments[0], arguments[1:])
    elif arguments[:1] == ["distributed"]:
        from . import distributed_run  # torch's tensor parallelism takes a second to import

        distributed_run.main(arguments[1:])
    elif arguments[:1] == ["account"]:
        account.main(arguments[1:])
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
