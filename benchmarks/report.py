"""Results file -> tables. Reads results only: no figure here is typed by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYER_COLUMNS = ("eager", "compile", "max_autotune", "coda", "ceiling", "gemms", "gemms_fused")
GRAPH_COLUMNS = ("compile_graph", "max_autotune_graph", "coda_graph")
LLAMA_COLUMNS = ("eager", "compile", "coda", "compile_graph", "coda_graph")
LABELS = {
    "compile": "torch.compile",
    "max_autotune": "max-autotune",
    "gemms": "7 GEMMs (cuBLAS)",
    "gemms_fused": "4 GEMMs (cuBLAS)",
    "ceiling": "hand-composed",
    "compile_graph": "torch.compile, graph",
    "max_autotune_graph": "max-autotune, graph",
    "coda_graph": "coda, graph",
}
MISSING = "-"


def label(name: str) -> str:
    """The heading of a variant's column."""
    return LABELS.get(name, name)


def complete(results: dict, suite: str) -> Iterator[tuple[str, dict]]:
    """The (part, result) pairs of `suite` that were measured."""
    return (
        (part, result) for part, result in results.get(suite, {}).items() if "variants" in result
    )


def merged(parts: list[dict]) -> dict:
    """One results dict out of several runs on one machine; where parts overlap, the later one wins.

    Raises ValueError if the runs are not of one GPU, driver and set of package versions.
    """
    first = parts[0]["environment"]
    results: dict = {"environment": dict(first)}
    for part in parts:
        for key in ("gpu", "driver", "versions"):
            known, found = _others(first[key]), _others(part["environment"][key])
            if known != found:
                found = f"{known} and {found}"
                raise ValueError(f"runs differ in {key} ({found}): render them one by one")
        for suite, measured in part.items():
            if suite != "environment":
                results.setdefault(suite, {}).update(measured)
    for key in ("commit", "date", "command"):
        values = dict.fromkeys(part["environment"][key] or "unknown" for part in parts)
        results["environment"][key] = "; ".join(values)
    return results


def _others(value: Any) -> Any:
    """``value`` without our own version: the commit says which code of ours ran."""
    if isinstance(value, dict):
        return {name: version for name, version in value.items() if name != "coda-inductor"}
    return value


def median(result: dict, name: str) -> float | None:
    """Median milliseconds of one variant, None if it was not measured."""
    return result["variants"].get(name, {}).get("median_ms")


def speedup(result: dict, ours: str, baselines: tuple[str, ...]) -> float | None:
    """Time of the fastest measured baseline over the time of `ours`; None if either is missing."""
    known = [time for time in (median(result, name) for name in baselines) if time is not None]
    own = median(result, ours)
    return min(known) / own if known and own else None


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def _table(rows: list[list[str]], headers: list[str], form: str) -> str:
    return tabulate(rows, headers=headers, tablefmt=form, disable_numparse=True, stralign="right")


def _times(result: dict, names: tuple[str, ...]) -> list[str]:
    return [_number(median(result, name), ".3f") for name in names]


def layer_times(results: dict, form: str = "github") -> str:
    """Medians in ms per size, and the speedup over the better torch.compile."""
    rows = [
        [
            size,
            *_times(result, LAYER_COLUMNS),
            _number(speedup(result, "coda", LAYER_COLUMNS[1:3]), ".3f"),
        ]
        for size, result in complete(results, "layer")
    ]
    return _table(rows, ["ms", *map(label, LAYER_COLUMNS), "speedup"], form)


def layer_graphs(results: dict, form: str = "github") -> str:
    """Medians in ms of CUDA-graph replays, their speedup, and the host's microseconds per ordinary
    call.
    """
    rows = []
    for size, result in complete(results, "layer"):
        hosts = [result["variants"].get(name, {}).get("host_us") for name in ("compile", "coda")]
        gain = _number(speedup(result, "coda_graph", GRAPH_COLUMNS[:2]), ".3f")
        rows.append(
            [size, *_times(result, GRAPH_COLUMNS), gain, *(_number(host, ".0f") for host in hosts)]
        )
    headers = [
        "ms",
        *map(label, GRAPH_COLUMNS),
        "speedup",
        "host us, torch.compile",
        "host us, coda",
    ]
    return _table(rows, headers, form)


def errors(results: dict, suite: str, form: str = "github") -> str:
    """Relative errors per output, variant beside variant, and ours over torch.compile's."""
    names = ("eager", "compile", "max_autotune", "coda", "ceiling")
    shown = [
        name
        for name in names
        if any(name in result["accuracy"] for _, result in complete(results, suite))
    ]
    rows = []
    for part, result in complete(results, suite):
        accuracy = result["accuracy"]
        for output in next(iter(accuracy.values()), {}):
            found = {name: accuracy[name][output] for name in shown if name in accuracy}
            pair = "coda" in found and "compile" in found
            ratio = found["coda"] / found["compile"] if pair and found["compile"] else None
            cells = [_number(found.get(name), ".2e") for name in shown]
            rows.append([part, output, *cells, _number(ratio, ".3f")])
    return _table(rows, ["", "output", *map(label, shown), "coda / torch.compile"], form)


def llama_times(results: dict, form: str = "github") -> str:
    """Medians in ms per sequence length, speedups, gain per layer in us and peak memory of a call
    in MiB.
    """
    rows = []
    for tokens, result in complete(results, "llama"):
        compiled, ours = median(result, "compile"), median(result, "coda")
        layers = result["shape"]["num_hidden_layers"]
        gain = None if compiled is None or ours is None else (compiled - ours) / layers * 1e3
        peaks = [result["variants"].get(name, {}).get("peak_mib") for name in ("compile", "coda")]
        rows.append(
            [
                tokens,
                *_times(result, LLAMA_COLUMNS),
                _number(speedup(result, "coda", ("compile",)), ".3f"),
                _number(speedup(result, "coda_graph", ("compile_graph",)), ".3f"),
                _number(gain, ".0f"),
                *(_number(peak, ".0f") for peak in peaks),
            ]
        )
    headers = [
        "ms, tokens",
        *map(label, LLAMA_COLUMNS),
        "speedup",
        "speedup, graph",
        "us gained per layer",
    ]
    return _table(rows, [*headers, "peak MiB, torch.compile", "peak MiB, coda"], form)


def compile_seconds(results: dict, form: str = "github") -> str:
    """Seconds to the first result with empty and with filled caches, per backend."""
    rows = [
        [
            backend,
            *(
                _number(runs.get(state, {}).get("first_call_s"), ".1f")
                for state in ("cold", "warm")
            ),
        ]
        for backend, runs in results.get("compile", {}).items()
    ]
    return _table(rows, ["backend", "cold s", "warm s"], form)


def failures(results: dict) -> list[str]:
    """One line for every variant or part that has no figures, with the reason."""
    lines = []
    for suite in ("layer", "llama"):
        for part, result in results.get(suite, {}).items():
            if "error" in result:
                lines.append(f"{suite} {part}: {result['error']}")
            lines += [
                f"{suite} {part}, {name}: {why}" for name, why in result.get("errors", {}).items()
            ]
    for backend, runs in results.get("compile", {}).items():
        lines += [
            f"compile, {backend}, {state}: {run['error']}"
            for state, run in runs.items()
            if "error" in run
        ]
    return lines


def short(results: dict) -> str:
    """The tables that a terminal wants last."""
    parts = []
    if results.get("layer"):
        parts += [
            layer_times(results, "simple"),
            layer_graphs(results, "simple"),
            errors(results, "layer", "simple"),
        ]
    if results.get("llama"):
        parts += [llama_times(results, "simple"), errors(results, "llama", "simple")]
    if results.get("compile"):
        parts.append(compile_seconds(results, "simple"))
    return "\n\n".join([*parts, *(f"NOT MEASURED {line}" for line in failures(results))])


def profiles(results: dict) -> str:
    """Device time by kernel of every profiled variant, then what our backend reports about each
    part.
    """
    blocks = []
    for suite in ("layer", "llama"):
        for part, result in complete(results, suite):
            for name, profile in result["profile"].items():
                rows = [
                    [f"{k['us']:.1f}", f"{k['calls']:.1f}", k["name"][:110]]
                    for k in profile["kernels"]
                ]
                title = (
                    f"{suite} {part}: {name}, {profile['total_us']:.0f} us on the device per call"
                )
                blocks.append(title + "\n" + _plain(rows, ["us", "calls", "kernel"]))
            blocks += [
                f"{suite} {part}: coda's report\n{table}" for table in result.get("reports", [])
            ]
            if "counters" in result:
                blocks.append(f"{suite} {part}: coda's counters {result['counters']}")
    return "\n\n".join(blocks) + "\n"


def _plain(rows: list[list[str]], headers: list[str]) -> str:
    return tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True)


def _environment(environment: dict) -> str:
    versions = ", ".join(
        f"{name} {version or 'absent'}" for name, version in environment["versions"].items()
    )
    rows = [
        ["GPU", f"{environment['gpu'] or 'none'}, driver {environment['driver'] or 'none'}"],
        ["software", f"Python {environment['python']}, {versions}"],
        ["commit", environment["commit"] or "unknown"],
        ["date", environment["date"]],
        ["command", f"`{environment['command']}`"],
    ]
    return tabulate(rows, headers=["", ""], tablefmt="github", disable_numparse=True)


LAYER_NOTES = """\
The non-attention part of one Llama layer, forward under `torch.no_grad()`, bf16, {rows} rows:
separate q/k/v and gate/up `nn.Linear` and a norm module ({norm}). *speedup* is the time of the
better of the two torch.compile columns over coda's. The GEMM columns are cuBLAS products of the
same shapes and nothing else. *hand-composed* is written directly in QuACK epilogues; it reads gate
and up interleaved from one weight and q, k, v from one weight, which a module with separate
parameters does not offer, and it also stores the pre-activations that training needs."""

LLAMA_NOTES = """\
`transformers.LlamaForCausalLM`, unmodified, {num_hidden_layers} layers of width {hidden_size}, MLP
{intermediate_size}, {num_attention_heads} heads, {num_key_value_heads} key-value heads, vocabulary
{vocab_size}, random bf16 weights: prefill of one prompt without a cache, logits of the last
position. Attention is the same code in both compiled columns. Peak memory is what one call needs
beyond weights and inputs."""

METHOD = """\
Each figure is the median of interleaved rounds (one call of every variant per round, the order
rotating) after warm-up, in one process, timed with CUDA events; all samples are in the results
file. Every compiled variant has its own copy of the module with the same weights. Errors are
Frobenius norms of the difference from an fp32 eager reference with the same weights, over the norm
of that reference."""


def markdown(results: dict, sources: list[str], plots: list[str]) -> str:
    """The page docs/benchmarks.md.

    Args:
        results: what to render.
        sources: names of the results files in benchmarks/results that it came from.
        plots: names of the images beside the page.
    """
    files = " ".join(f"benchmarks/results/{source}" for source in sources)
    lines = ["# Benchmarks", "", f"Rendered by `python -m benchmarks report {files}`; do not edit."]
    lines += ["", _environment(results["environment"]), "", METHOD, ""]
    lines += [line for image in plots for line in (f"![{image}]({image})", "")]
    layer = dict(complete(results, "layer"))
    if layer:
        shape = next(iter(layer.values()))["shape"]
        norm = "HF's spelling of RMSNorm" if shape["norm"] == "hf" else "`nn.RMSNorm`"
        lines += [
            "## Layer",
            "",
            LAYER_NOTES.format(rows=shape["M"], norm=norm),
            "",
            layer_times(results),
            "",
        ]
        lines += [
            "Replayed as CUDA graphs, and what an ordinary call costs the host:",
            "",
            layer_graphs(results),
            "",
        ]
        lines += ["Errors:", "", errors(results, "layer"), ""]
    llama = dict(complete(results, "llama"))
    if llama:
        shape = next(iter(llama.values()))["shape"]
        lines += ["## Llama", "", LLAMA_NOTES.format(**shape), "", llama_times(results), ""]
        lines += ["Errors of the last position's logits:", "", errors(results, "llama"), ""]
    if results.get("compile"):
        note = "Seconds to the first result in a new process; cold: with empty compile caches."
        lines += ["## Compile time", "", note, "", compile_seconds(results), ""]
    if failures(results):
        lines += ["## Not measured", "", *(f"- {line}" for line in failures(results)), ""]
    return "\n".join(lines)
