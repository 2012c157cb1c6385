# SPDX-License-Identifier: Apache-2.0
"""Results -> tables of the suites with gradients; see :mod:`benchmarks.tables`."""

from __future__ import annotations

from .tables import (
    WITHOUT,
    cells,
    complete,
    error_columns,
    error_ratio,
    label,
    labels,
    measurement,
    number,
    speedup,
    table,
)

MEMORY_COLUMNS = ("eager", "compile", "max_autotune", "coda", "ceiling")
STEP_COLUMNS = (
    *("eager", "liger", "liger_compile", "compile", "coda"),
    *("compile_checkpoint", "coda_checkpoint"),
)
KERNEL_COLUMNS = ("eager", "liger", "compile", "coda", "gemms")
BLOCKS = {
    "residual_norm": "GEMM, residual, RMSNorm",
    "residual_norm_gemm": "GEMM, residual, RMSNorm, GEMM",
    "norm_swiglu": "RMSNorm, 2 GEMMs, SwiGLU",
    "swiglu_down": "SwiGLU, GEMM",
    "rotary": "2 GEMMs, rotary embedding",
    "norm_rotary": "2 GEMMs, norms of heads, rotary",
}
MIB_PER_GIB = 1024


def layer_memory(results: dict, form: str = "github") -> str:
    """Peak MiB of a step beyond weights and inputs; the gradients count."""
    rows = [
        [size, *cells(result, MEMORY_COLUMNS, "peak_mib", ".0f")]
        for size, result in complete(results, "layer_train")
    ]
    return table(rows, ["peak MiB", *labels(MEMORY_COLUMNS)], form)


def step_times(results: dict, form: str = "github") -> str:
    """Times of a training step per model and tokens, and coda's speedups over torch.compile, over
    the better of Liger's two, and over torch.compile with checkpointing on both sides.
    """
    rows = [
        [
            tokens,
            *cells(result, STEP_COLUMNS),
            number(speedup(result, "coda", ("compile",)), ".3f"),
            number(speedup(result, "coda", ("liger", "liger_compile")), ".3f"),
            number(speedup(result, "coda_checkpoint", ("compile_checkpoint",)), ".3f"),
        ]
        for tokens, result in complete(results, "model_train")
    ]
    gains = ["speedup", f"speedup over {label('liger')}", "speedup, checkpointing"]
    return table(rows, ["ms, model and tokens", *labels(STEP_COLUMNS), *gains], form)


def step_parts(results: dict, form: str = "github") -> str:
    """What each pattern is worth: time and peak GiB beyond the model of ours, and of ours with that
    pattern disabled.
    """
    rows = []
    for part, result in complete(results, "model_train"):
        names = [name for name in result["variants"] if name.startswith(WITHOUT)]
        for name in ["coda", *names] if names else ():
            gib = number(step_gib(result, name, with_model=False), ".2f")
            rows.append([part, name, *cells(result, (name,)), gib])
    return table(rows, ["", "", "ms", "peak GiB"], form)


def step_gib(result: dict, name: str, with_model: bool) -> float | None:
    """Peak GiB of a step, with or without parameters and optimizer state; None on a CPU."""
    step = measurement(result, name, "peak_mib")
    model = measurement(result, name, "model_mib")
    if step is None or model is None:
        return None
    return (step + with_model * model) / MIB_PER_GIB


def step_memory(results: dict, form: str = "github") -> str:
    """Peak GiB of a model's training step per model and tokens, in all and beyond the model."""
    rows = [
        [
            tokens,
            what,
            *(number(step_gib(result, name, with_model), ".2f") for name in STEP_COLUMNS),
        ]
        for tokens, result in complete(results, "model_train")
        for what, with_model in (("in all", True), ("beyond the model", False))
    ]
    return table(rows, ["peak GiB, model and tokens", "", *labels(STEP_COLUMNS)], form)


def block_label(part: str, result: dict, between: str) -> str:
    """What a part of suite `kernels` is, and its width d."""
    block = part.split(maxsplit=1)[0]
    return f"{BLOCKS.get(block, block)}{between}{result['shape']['d']}"


def kernel_times(results: dict, ending: str, form: str = "github") -> str:
    """Times per block and width of the variants whose names end in `ending`, and coda's speedups
    over torch.compile and over Liger.
    """
    names = tuple(name + ending for name in KERNEL_COLUMNS)
    rows = []
    for part, result in complete(results, "kernels"):
        gains = [
            number(speedup(result, "coda" + ending, (name + ending,)), ".3f")
            for name in ("compile", "liger")
        ]
        rows.append([*block_label(part, result, "\n").split("\n"), *cells(result, names), *gains])
    headers = ["ms", "d", *labels(KERNEL_COLUMNS), "speedup"]
    return table(rows, [*headers, f"speedup over {label('liger')}"], form)


def kernel_errors(results: dict, form: str = "github") -> str:
    """The worst relative error among a block's outputs and gradients by variant, and the worst
    ratio of ours to torch.compile's.
    """
    shown = error_columns(results, "kernels")
    rows = []
    for part, result in complete(results, "kernels"):
        accuracy = result["accuracy"]
        worst = [
            number(max(accuracy.get(name, {}).values(), default=None), ".2e") for name in shown
        ]
        pairs = [
            {name: accuracy[name][tensor] for name in ("coda", "compile")}
            for tensor in accuracy.get("coda", {})
            if tensor in accuracy.get("compile", {})
        ]
        ratios = [ratio for ratio in map(error_ratio, pairs) if ratio is not None]
        place = block_label(part, result, "\n").split("\n")
        rows.append([*place, *worst, number(max(ratios, default=None), ".3f")])
    return table(rows, ["worst error", "d", *labels(shown), "coda / torch.compile"], form)
