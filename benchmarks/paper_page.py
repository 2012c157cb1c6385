# SPDX-License-Identifier: Apache-2.0
"""docs/results/paper.md and its picture, from what ``python -m benchmarks paper`` measured."""

import statistics
from pathlib import Path
from typing import Any

from .environment import REPOSITORY
from .measure import table

PAGE = REPOSITORY / "docs" / "results" / "paper.md"
TITLES = {"forward": "Forward", "backward": "Backward", "step": "Forward and backward"}
COLORS = {"eager": "#c9ced6", "liger": "#e3b673", "flashinfer": "#b7a5d3", "quack": "#93c59b",
          "paper": "#e08a8a", "coda": "#4f8fd0"}  # fmt: skip
_HEAD = """
CODA (arXiv 2605.19269) cuts a Llama layer into kernels. This page times the same cuts, which coda
compiles from plain torch: *residual* is GEMM, residual, RMSNorm, GEMM; *swiglu* RMSNorm, the GEMMs
of gate and up, SwiGLU; *rotary* the GEMMs of q and k and their rotation; *head* the LM head with
cross entropy; *layer* all of a layer but attention. bfloat16, 8192 tokens, the width in each row,
heads of 128, no grouped heads, vocabulary 32768, no gradients of weights. Only
`head 4096x128256`, of 4096 tokens, has them.

A time is the median of samples in which one variant runs back to back, A B B A. A backward is
`autograd.grad` of a graph that is kept. *compile*, torch.compile, is the baseline. *liger* and
*flashinfer* stand around cuBLAS; Liger's SwiGLU writes its gradients over what its forward saved,
so that only its first backward of a graph is right, and its head makes the gradients in the
forward. *quack* is QuACK's functions put together by hand, *paper* the paper's own kernels. Neither
tries its configurations, and coda measures none. These samples were of 0.1 s and vary by 5 %: the
[gotchas](../internals/gotchas.md) ("Power") have calmer ones. Rendered by
`python -m benchmarks paper FILE --render`; do not edit.
"""
_ERROR = "Worst Frobenius norm of a result's difference from float32, over float32's:"


def number(value: float | None, form: str, unit: float = 1) -> str:
    """`value` in `unit`, in format `form`; a dash for None."""
    return "-" if value is None else format(value / unit, form)


def baseline(result: dict[str, Any], mode: str) -> float | None:
    """Milliseconds of torch.compile."""
    return result["variants"].get("compile", {}).get(mode, {}).get("median_ms")


def write(found: dict[str, Any], source: str, page: Path = PAGE) -> None:
    """The page and, beside it, the picture."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(found, source))
    draw(found, page.with_suffix(".svg"))


def markdown(found: dict[str, Any], source: str) -> str:
    """The page."""
    results, where = found["results"], found["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items() if v)
    if own := where.get("versions of the paper's kernels"):
        versions += f" (the paper's kernels: quack-kernels {own['quack-kernels']})"
    run = f"{where['gpu']}, {where['date'][:10]}, commit {where['commit']}, {versions}"
    lines = ["# The paper's kernels", "", _summary(results), "", "![Speed](paper.svg)"]
    lines += [_HEAD, f"`{source}`: one {run}: `{where['command']}`."]
    names = list(dict.fromkeys(v for result in results.values() for v in result["variants"]))

    def rows(mode: str, key: str, form: str, unit: float = 1) -> list[list[str]]:
        own = []
        for case, result in results.items():
            facts = [result["variants"].get(name, {}).get(mode, {}).get(key) for name in names]
            row = [case, *(number(each, form, unit) for each in facts)]
            if key == "median_ms":
                ours, best = facts[names.index("coda")], baseline(result, mode)
                row.append(number(best / ours if ours and best else None, ".2f"))
            if any(each is not None for each in facts):
                own.append(row)
        return own

    for mode, title in TITLES.items():
        lines += ["", f"## {title}", "", "ms, and the baseline over coda:", ""]
        lines.append(table(rows(mode, "median_ms", ".3f"), ["", *names, "speedup"], "github"))
    for mode in ("forward", "backward"):
        lines += ["", f"## Error, {mode}", "", _ERROR, ""]
        lines.append(table(rows(mode, "error", ".2e"), ["", *names], "github"))
    lines += ["", "## Peak GiB of a forward and backward, weights and inputs not included", ""]
    lines.append(table(rows("step", "peak_mib", ".2f", 1024), ["", *names], "github"))
    cases: dict[tuple[str, str], list[str]] = {}
    for case, result in results.items():
        for error in result["errors"].items():
            cases.setdefault(error, []).append(case)
    missing = [f"- {what} of {', '.join(of)}: {why[:100]}" for (what, why), of in cases.items()]
    return "\n".join([*lines, *(["", "## Not measured", "", *missing] if missing else [])]) + "\n"


def _summary(results: dict[str, Any]) -> str:
    """The result in one sentence."""
    said = []
    for mode, title in TITLES.items():
        ours = {case: r["variants"].get("coda", {}).get(mode) for case, r in results.items()}
        speeds = [best / time["median_ms"] for case, time in ours.items()
                  if time and (best := baseline(results[case], mode))]  # fmt: skip
        said += [f"{title.lower()} {statistics.geometric_mean(speeds):.2f}x"] if speeds else []
    return f"coda over torch.compile, geometric means of all cuts: {', '.join(said)}."


def draw(found: dict[str, Any], path: Path) -> None:
    """Bars: speed relative to cuBLAS with torch.compile, forward above backward. Of a head, whose
    gradients some make in the forward, forward and backward stand for the latter."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    results = found["results"]
    figure = Figure(figsize=(13, 7), layout="constrained")
    bars: dict[str, Any] = {}
    for axes, title in zip(figure.subplots(2, 1), ("forward", "backward"), strict=True):
        for place, (case, result) in enumerate(results.items()):
            mode = "step" if title == "backward" and case.startswith("head") else title
            best = baseline(result, mode)
            shown = [name for name in COLORS if best and mode in result["variants"].get(name, {})]
            for k, name in enumerate(shown):
                speed = best / result["variants"][name][mode]["median_ms"]
                x = place + (k - len(shown) / 2 + 0.5) * 0.13
                bars[name] = axes.bar(x, speed, 0.12, color=COLORS[name])
                if name == "coda":
                    axes.text(x, speed, f"{speed:.2f}", ha="center", va="bottom", fontsize=8)
        axes.axhline(1, color="#444444", linewidth=0.8)
        axes.set_xticks(range(len(results)), results, fontsize=7.5, rotation=15)
        heads = " (heads: forward and backward)" if title == "backward" else ""
        axes.set_title(f"{title}{heads}: speed relative to torch.compile", fontsize=9.5, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(bars.values(), bars, fontsize=8, ncols=len(bars), loc="outside upper right")
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paper"}):
        figure.savefig(path, metadata={"Date": None})
