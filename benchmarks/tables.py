# SPDX-License-Identifier: Apache-2.0
"""Results -> tables: what all tables share, and those of the suites without gradients.

Reads results only: no figure here is typed by hand. Every table takes the results of a run and
``tabulate``'s name of a format; columns are medians in milliseconds unless they say otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from .cases import RECIPES

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYER_COLUMNS = ("eager", "compile", "max_autotune", "coda", "ceiling", "gemms", "gemms_fused")
#: The two modes of torch.compile: a speedup of a layer is over the better one.
COMPILE_MODES = ("compile", "max_autotune")
GRAPH_COLUMNS = ("compile_graph", "max_autotune_graph", "coda_graph")
LLAMA_COLUMNS = ("eager", "compile", "coda", "compile_graph", "coda_graph")
ERROR_COLUMNS = (
    *("eager", "liger", "liger_compile", "compile", "max_autotune", "coda", "ceiling"),
    *("compile_checkpoint", "coda_checkpoint"),
)
LABELS = {
    "compile": "torch.compile",
    "compile_causal": "torch.compile, is_causal",
    "max_autotune": "max-autotune",
    "coda_options": "coda, options",
    "gemms": "GEMMs (cuBLAS)",
    "gemms_fused": "fewer GEMMs (cuBLAS)",
    "ceiling": "hand-composed",
    "liger": "Liger",
    "liger_compile": "Liger, compiled",
    "compile_graph": "torch.compile, graph",
    "max_autotune_graph": "max-autotune, graph",
    "coda_graph": "coda, graph",
    "compile_checkpoint": "torch.compile, checkpointing",
    "coda_checkpoint": "coda, checkpointing",
}
LABELS |= {f"compile_{recipe}": f"torchao {recipe}, torch.compile" for recipe in RECIPES}
LABELS |= {f"coda_{recipe}": f"torchao {recipe}, coda" for recipe in RECIPES}
GEMM_COUNTS = {"layer": {"gemms": 7, "gemms_fused": 4}}
GEMM_COUNTS["layer_train"] = {name: 3 * count for name, count in GEMM_COUNTS["layer"].items()}
#: Begins the name of ours with one pattern disabled.
WITHOUT = "coda without "
MISSING = "-"


def label(name: str, suite: str = "") -> str:
    """The heading of a variant's column."""
    count = GEMM_COUNTS.get(suite, {}).get(name)
    return f"{count} GEMMs (cuBLAS)" if count else LABELS.get(name, name)


def labels(names: tuple[str, ...] | list[str], suite: str = "") -> list[str]:
    """The headings of several columns."""
    return [label(name, suite) for name in names]


def complete(results: dict, suite: str) -> Iterator[tuple[str, dict]]:
    """The (part, result) pairs of `suite` that were measured."""
    return (
        (part, result) for part, result in results.get(suite, {}).items() if "variants" in result
    )


def median(result: dict, name: str) -> float | None:
    """Median milliseconds of one variant, None if it was not measured."""
    return measurement(result, name, "median_ms")


def measurement(result: dict, name: str, key: str) -> float | None:
    """One measurement of one variant, such as ``"peak_mib"``; None if it was not measured."""
    return result["variants"].get(name, {}).get(key)


def speedup(result: dict, ours: str, baselines: tuple[str, ...]) -> float | None:
    """Time of the fastest measured baseline over the time of `ours`; None if either is missing."""
    known = [time for time in (median(result, name) for name in baselines) if time is not None]
    own = median(result, ours)
    return min(known) / own if known and own else None


def gain_us(result: dict) -> float | None:
    """Microseconds per layer by which coda is faster than torch.compile; None if either is
    missing.
    """
    compiled, ours = median(result, "compile"), median(result, "coda")
    if compiled is None or ours is None:
        return None
    return (compiled - ours) / result["shape"]["num_hidden_layers"] * 1e3


def number(value: float | None, form: str) -> str:
    """`value` in format `form`; a dash for None."""
    return MISSING if value is None else format(value, form)


def table(rows: list[list[str]], headers: list[str], form: str) -> str:
    """``tabulate`` with every cell as it is; nothing without rows."""
    if not rows:
        return ""
    return tabulate(rows, headers=headers, tablefmt=form, disable_numparse=True, stralign="right")


def cells(
    result: dict, names: tuple[str, ...], key: str = "median_ms", form: str = ".3f"
) -> list[str]:
    """One measurement of each of several variants."""
    return [number(measurement(result, name, key), form) for name in names]


def layer_times(results: dict, suite: str, form: str = "github") -> str:
    """Times per size, and the speedup over the better torch.compile."""
    rows = [
        [
            size,
            *cells(result, LAYER_COLUMNS),
            number(speedup(result, "coda", COMPILE_MODES), ".3f"),
        ]
        for size, result in complete(results, suite)
    ]
    return table(rows, ["ms", *labels(LAYER_COLUMNS, suite), "speedup"], form)


def layer_graphs(results: dict, suite: str, form: str = "github") -> str:
    """Times of CUDA-graph replays, their speedup, and the host's microseconds per ordinary call."""
    hosts = ("compile", "coda")
    rows = [
        [
            size,
            *cells(result, GRAPH_COLUMNS),
            number(speedup(result, "coda_graph", GRAPH_COLUMNS[:2]), ".3f"),
            *cells(result, hosts, "host_us", ".0f"),
        ]
        for size, result in complete(results, suite)
    ]
    host_headers = [f"host us, {name}" for name in labels(hosts)]
    return table(rows, ["ms", *labels(GRAPH_COLUMNS), "speedup", *host_headers], form)


def errors(results: dict, suite: str, form: str = "github") -> str:
    """Relative errors per output, variant beside variant, and ours over torch.compile's."""
    shown = error_columns(results, suite)
    rows = []
    for part, result in complete(results, suite):
        accuracy = result["accuracy"]
        for output in next(iter(accuracy.values()), {}):
            found = {name: accuracy[name][output] for name in shown if name in accuracy}
            errors = [number(found.get(name), ".2e") for name in shown]
            rows.append([part, output, *errors, number(error_ratio(found), ".3f")])
    return table(rows, ["", "output", *labels(shown), "coda / torch.compile"], form)


def error_columns(results: dict, suite: str) -> list[str]:
    """The variants whose errors are known in any part of `suite`."""
    known = {name for _, result in complete(results, suite) for name in result["accuracy"]}
    return [name for name in ERROR_COLUMNS if name in known]


def error_ratio(found: dict[str, float]) -> float | None:
    """Our error over torch.compile's, None if either is missing or torch.compile's is 0."""
    if "coda" not in found or not found.get("compile"):
        return None
    return found["coda"] / found["compile"]


def llama_times(results: dict, form: str = "github") -> str:
    """Times per sequence length, speedups, gain per layer in us and peak memory of a call in
    MiB.
    """
    peaks = ("compile", "coda")
    rows = [
        [
            tokens,
            *cells(result, LLAMA_COLUMNS),
            number(speedup(result, "coda", ("compile",)), ".3f"),
            number(speedup(result, "coda_graph", ("compile_graph",)), ".3f"),
            number(gain_us(result), ".0f"),
            *cells(result, peaks, "peak_mib", ".0f"),
        ]
        for tokens, result in complete(results, "llama")
    ]
    headers = ["ms, tokens", *labels(LLAMA_COLUMNS), "speedup", "speedup, graph"]
    headers += ["us gained per layer", *(f"peak MiB, {name}" for name in labels(peaks))]
    return table(rows, headers, form)


def compile_seconds(results: dict, form: str = "github") -> str:
    """Seconds to the first result with empty and with filled caches, per backend."""
    rows = [
        [
            backend,
            *(number(runs.get(state, {}).get("first_call_s"), ".1f") for state in ("cold", "warm")),
        ]
        for backend, runs in results.get("compile", {}).items()
    ]
    return table(rows, ["backend", "cold s", "warm s"], form)
