# SPDX-License-Identifier: Apache-2.0
"""What a results file of ``train.py`` shows: the comparison, the plot of the losses, the page.

Two measures of noise stand beside the difference between a backend and eager. *Spread*: the
standard deviation of eager's final loss over the seeds, which is what another seed changes.
*Rounding noise*: how far apart implementations come that differ in rounding alone: eager from
itself with the rows of each batch in reverse order, and torch.compile from eager. It is far smaller
than the spread, so it sees a bias that would hide in that. All figures are computed from the file.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from tabulate import tabulate

#: A final training loss is the mean over so many last steps.
LAST = 20
#: In the order in which curves are drawn, the last one on top.
COLOURS = {
    "eager_reversed": "#aaaaaa",
    "eager": "#222222",
    "inductor": "#1f77b4",
    "coda": "#d62728",
}
CONTROLS = ("eager_reversed", "inductor")
LABELS = {
    "eager_reversed": "eager, batches reversed",
    "inductor": "torch.compile",
    "coda": 'backend="coda"',
    "coda_default": 'backend="coda", default gate',
}
#: How a loss is called in tables, and its value in a run.
FINAL = {
    "training": lambda run: statistics.fmean(run["losses"][-LAST:]),
    "evaluation": lambda run: run["eval_loss"],
}

PAGE_HEAD = """# Training

Rendered by `python examples/train.py --plot`; do not edit.

A small Llama trained from scratch on real text by eager PyTorch, by torch.compile and by
`backend="coda"`. For each seed all of them start from the same weights and see the same batches, so
that only rounding separates their losses. `coda` runs with `options={"gate": "always"}` here:
whatever may be fused is.

"""
LOSSES_TEXT = """Nats a byte, mean +- standard deviation over the seeds. *Spread* is the standard
deviation of eager's loss over the seeds. *Rounding noise* is how far correct implementations come
apart, as the root mean square over the seeds of the difference to eager: of eager with the rows of
each batch reversed, or of torch.compile, whichever is larger. A run has diverged if a loss is not
finite, or if one in its second half is above the first.

"""
SPEED_TEXT = """Median time of a whole step (forward, backward, clipping, optimizer), and the
peak of device memory with parameters and optimizer state. The backends ran one after another,
not interleaved, so a few percent between them say nothing: [benchmarks.md](benchmarks.md) compares
speed. The first step has the compilation of the training graph in it; kernels that a backend
before it has built are not built again.

"""

Runs = dict[str, dict[int, dict[str, Any]]]


def grouped(results: dict) -> Runs:
    """The runs by backend and seed."""
    found: Runs = {}
    for run in results["runs"]:
        found.setdefault(run["backend"], {})[run["seed"]] = run
    return found


def differences(runs: Runs, backend: str, loss: str) -> list[float]:
    """``backend``'s final loss minus eager's, for each seed that both have."""
    final, eager = FINAL[loss], runs.get("eager", {})
    return [final(run) - final(eager[s]) for s, run in runs[backend].items() if s in eager]


def diverged(run: dict) -> str:
    """Why a run counts as diverged; empty where it does not."""
    losses = [*run["losses"], run["eval_loss"]]
    if not all(math.isfinite(loss) for loss in losses):
        return "a loss is not finite"
    late = max(losses[len(losses) // 2 :])
    return f"a late loss of {late:.3f} is above the first" if late >= losses[0] else ""


def judge(results: dict, backend: str) -> dict[str, dict[str, float | bool]]:
    """The comparison of ``backend`` with eager, for the training and the evaluation loss.

    Returns:
        ``{loss: {"difference", "spread", "noise", "within_spread", "within_noise"}}``, in nats a
        byte. ``difference`` is the mean over the seeds of the paired differences; it is within the
        spread if its size is at most that, and within rounding noise if it is at most twice that.
        ``noise`` is the root mean square over the seeds of a control's differences, of the noisier
        one where the file has both. What cannot be told is absent: the spread with one seed, the
        noise without a control or for a control itself.
    """
    runs, verdict = grouped(results), {}
    for loss, final in FINAL.items():
        own = differences(runs, backend, loss)
        if not own:
            continue
        found: dict[str, float | bool] = {"difference": statistics.fmean(own)}
        size = abs(statistics.fmean(own))
        if len(runs["eager"]) > 1:
            found["spread"] = statistics.stdev([final(run) for run in runs["eager"].values()])
            found["within_spread"] = size <= found["spread"]
        controls = [name for name in CONTROLS if name in runs]
        if controls and backend not in CONTROLS:
            found["noise"] = max(_rms(differences(runs, name, loss)) for name in controls)
            found["within_noise"] = size <= 2 * found["noise"]
        verdict[loss] = found
    return verdict


def _rms(values: list[float]) -> float:
    return math.sqrt(statistics.fmean([value**2 for value in values]))


def tables(results: dict) -> str:
    """All tables, as Markdown."""
    parts = [_losses(results), _speed(results), _verdicts(results), _fired(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _losses(results: dict) -> str:
    rows = []
    for backend, runs in grouped(results).items():
        finals = [[final(run) for run in runs.values()] for final in FINAL.values()]
        paired = [differences(grouped(results), backend, loss) for loss in FINAL]
        rows.append([_label(backend), len(runs), *map(_mean, finals), *map(_list, paired)])
    heads = ["", "seeds", f"training loss, last {LAST} steps", "evaluation loss"]
    heads += ["training loss - eager's, by seed", "evaluation loss - eager's, by seed"]
    return _markdown(rows, heads)


def _speed(results: dict) -> str:
    rows = []
    for backend, runs in grouped(results).items():
        times = [run["step_ms"] for run in runs.values()]
        middle = statistics.median(times)
        rate = next(run["tokens_per_s"] * run["step_ms"] for run in runs.values()) / middle
        peaks = [run["peak_mib"] for run in runs.values() if run["peak_mib"] is not None]
        first = next(iter(runs.values()))["first_step_s"]
        peak = f"{max(peaks):.0f}" if peaks else "-"
        by_seed = ", ".join(f"{time:.2f}" for time in times)
        rows.append(
            [_label(backend), f"{middle:.2f}", by_seed, f"{rate:.0f}", peak, f"{first:.1f}"]
        )
    heads = ["", "ms a step", "by seed", "tokens a second", "peak MiB", "first step, s"]
    return _markdown(rows, heads)


def _verdicts(results: dict) -> str:
    rows, runs = [], grouped(results)
    if "eager" not in runs:
        return "Nothing to compare with: eager was not run."
    for backend in runs:
        if backend in ("eager", "eager_reversed") or len(runs[backend]) < len(runs["eager"]):
            continue
        for loss, found in judge(results, backend).items():
            row = [_label(backend), loss, f"{found['difference']:+.5f}"]
            for measure in ("spread", "noise"):
                held = found.get(f"within_{measure}")
                row += [f"{found[measure]:.5f}" if measure in found else "-"]
                row += ["-" if held is None else "yes" if held else "NO"]
            rows.append(row)
    failed = [
        f"{_label(run['backend'])}, seed {run['seed']}: {why}"
        for run in results["runs"]
        if (why := diverged(run))
    ]
    heads = ["", "loss", "mean difference to eager", "spread over seeds", "within it"]
    heads += ["rounding noise", "within twice it"]
    table = _markdown(rows, heads) + "\n\n" if rows else ""
    return table + f"Diverged: {'; '.join(failed) if failed else 'no run'}."


def _fired(results: dict) -> str:
    """What fired in the backends that count anything, one line a backend and graph."""
    lines = []
    for backend, runs in grouped(results).items():
        run = next(iter(runs.values()))
        for phase in ("training", "evaluation"):
            counts = run[f"fired_{phase}"]
            if counts:
                names = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
                lines.append(f"- {_label(backend)}, {phase}: {names}")
        if run["sites"]:
            how = ", ".join(f"{count} {name}" for name, count in sorted(run["sites"].items()))
            lines.append(f"- {_label(backend)}, how the GEMMs of both graphs run: {how}")
    return "\n".join(lines)


def _label(backend: str) -> str:
    return LABELS.get(backend, backend)


def _mean(values: list[float]) -> str:
    spread = f" +- {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:+.4f}" for value in values)


def _markdown(rows: list[list[Any]], heads: list[str]) -> str:
    return tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)


def draw(results: dict, path: Path) -> None:
    """The loss curves, thin, one a seed and one colour a backend; below, what separates each from
    eager's with the same seed. Rendering the same results twice writes the same file.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    runs = grouped(results)
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    for backend in [name for name in COLOURS if name in runs]:
        style = {"color": COLOURS[backend], "linewidth": 0.6, "label": _label(backend)}
        for seed, run in runs[backend].items():
            if backend != "eager_reversed":
                upper.plot(run["losses"], **style)
            if backend != "eager" and seed in runs.get("eager", {}):
                pairs = zip(run["losses"], runs["eager"][seed]["losses"], strict=True)
                lower.plot([own - eager for own, eager in pairs], **style)
            style["label"] = None
    upper.set_ylabel("training loss, nats a byte")
    upper.set_title(_title(results), fontsize=10)
    lower.set_ylabel("loss - eager's, same seed")
    lower.set_xlabel("step")
    lower.axhline(0.0, color="black", linewidth=0.5)
    for axes in (upper, lower):
        axes.grid(linewidth=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    with rc_context({"svg.hashsalt": "training"}):
        figure.savefig(path, metadata={"Date": None})


def _title(results: dict) -> str:
    shape, recipe = results["model"]["model"], results["recipe"]
    where = results["environment"]["gpu"] if recipe["device"] == "cuda" else "CPU"
    millions = results["model"]["parameters"] / 1e6
    return f"Llama, {shape['num_hidden_layers']} layers, {millions:.1f}M parameters, {where}"


def write(results: dict, svg: Path | None, page: Path | None) -> None:
    """Draw the plot into ``svg`` and write the page that shows it to ``page``."""
    if svg:
        draw(results, svg)
    if page:
        page.write_text(_page(results, svg))


def _page(results: dict, svg: Path | None) -> str:
    recipe, size, text = results["recipe"], results["model"], results["text"]
    where, shape = results["environment"], size["model"]
    device = f"{where['gpu']}, driver {where['driver']}" if recipe["device"] == "cuda" else "CPU"
    versions = {"Python": where["python"], **where["versions"]}
    precision = f"{recipe['params']} parameters"
    precision += " under bfloat16 autocast" if recipe["autocast"] else ""
    model = (
        f"`transformers.LlamaForCausalLM`, unmodified: {shape['num_hidden_layers']} layers of "
        f"width {shape['hidden_size']}, MLP {shape['intermediate_size']}, "
        f"{shape['num_attention_heads']} heads, {shape['num_key_value_heads']} key-value heads, "
        f"{size['parameters'] / 1e6:.1f}M parameters, random weights"
    )
    training = (
        f"{precision}; {recipe['steps']} steps of {size['batch']} x {size['length']} bytes; AdamW, "
        f"betas {recipe['betas'][0]} and {recipe['betas'][1]}, weight decay "
        f"{recipe['weight_decay']}; rate {size['rate']:g}, linear warm-up over "
        f"{recipe['warmup']:.0%} of the steps, cosine to {recipe['floor']:.0%}; gradients clipped "
        f"to norm {recipe['clip']:g}"
    )
    corpus = (
        f"{text['what']}: {text['bytes'] / 1e6:.1f} MB, sha256 {text['sha256'][:16]}; "
        f"{text['training_rows']} rows to train on, {text['held_out_rows']} held out"
    )
    software = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    facts = [
        ["device", device],
        ["software", software],
        ["commit, date", f"{where['commit']}, {where['date']}"],
        ["command", f"`{where['command']}`"],
        ["model", model],
        ["training", training],
        ["text", corpus],
    ]
    image = f"![loss curves]({svg.name})\n\n" if svg else ""
    sections = [
        PAGE_HEAD + image + _markdown(facts, ["", ""]),
        "## Losses\n\n" + LOSSES_TEXT + _losses(results),
        _verdicts(results),
        "## Time and memory\n\n" + SPEED_TEXT + _speed(results),
    ]
    if fired := _fired(results):
        sections.append("## What fired\n\n" + fired)
    return "\n\n".join(sections) + "\n"
