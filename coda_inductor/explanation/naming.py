# SPDX-License-Identifier: Apache-2.0
"""What a person would call a kernel, an epilogue's work, a number of bytes.

Names are for reading: they come from the ops and the modules' names and decide nothing.
"""

from __future__ import annotations

from coda_inductor.explanation.kernels import Kernel, base
from coda_inductor.graph.gemms import GEMMS, gemm_inputs
from coda_inductor.graph.nodes import fake, is_transpose, module_path
from coda_inductor.program import EpilogueProgram
from coda_inductor.report import SiteReport

#: Ops that a kernel must have, and what it is then called: the first of each group.
_BY_OPS = (
    (("embedding", "embedding"),),
    (
        ("rsqrt var_mean", "LayerNorm"), ("rsqrt var", "LayerNorm"), ("rsqrt mean", "RMSNorm"),
        ("rsqrt", "finish row statistics"),
    ),
    (("flip", "rotary"), ("rev", "rotary"), ("neg cat", "rotary"), ("neg slice_scatter", "rotary")),
    (
        ("exp amax log", "cross entropy"), ("exp amax", "softmax"),
        ("exp neg div mul", "SiLU * up"), ("exp neg reciprocal mul", "SiLU * up"),
        ("exp neg div", "SiLU"), ("exp neg reciprocal", "SiLU"), ("silu", "SiLU"),
        ("gelu", "GELU"), ("erf", "GELU"), ("tanh", "GELU (tanh)"), ("sigmoid", "sigmoid"),
        ("relu", "ReLU"), ("threshold_backward", "ReLU"),
    ),
)  # fmt: skip
_COPIES = {"clone", "_to_copy", "convert_element_type", "cat"}
_SUMS = {"sum", "amax", "convert_element_type"}
#: Work that a pattern's name says better than its steps do.
_BY_PATTERN = {
    "swiglu": "SiLU(gate) * up",
    "swiglu_backward": "SwiGLU gradient",
    "rms_norm_backward": "RMSNorm gradient",
}


def leaf(path: str) -> str:
    """The last part of a module path; with the one before where it says little alone: ``fc.0``,
    ``output.dense``."""
    parts = path.split(".")
    if (parts[-1].isdigit() or parts[-1] == "dense") and len(parts) > 1:
        return ".".join(parts[-2:])
    return parts[-1]


def gemm_title(site: SiteReport) -> str:
    """``o_proj``; in the backward pass whose gradient it makes."""
    first, *others = site.site.split(" + ")
    return _titled(" + ".join([leaf(first), *others]), site.role)


def product(kernel: Kernel, *, backward: bool) -> tuple[str, str] | None:
    """Title and shape of a plain GEMM; None for products of batches (attention's)."""
    node = kernel.nodes[0]
    if node.target not in GEMMS:
        return None
    a, b = gemm_inputs(node)
    shape = " x ".join(str(s) for s in (fake(a).shape[0], fake(b).shape[1], fake(a).shape[1]))
    # The transposition may lie in the forward graph: then only the strides tell.
    turned = is_transpose(a) or (fake(a).stride()[0] == 1 and fake(a).stride()[1] != 1)
    role = "weight gradient" if turned else "input gradient"
    return _titled(leaf(kernel.path or node.name), role if backward else "forward"), shape


def _titled(name: str, role: str) -> str:
    return {"input gradient": f"{name}: d input", "weight gradient": f"{name}: d weight"}.get(
        role, name
    )


def epilogue_work(site: SiteReport) -> list[str]:
    """What the epilogue of a fused site does, a phrase each, in its own order."""
    program = site.program
    if program is None:
        return []
    named = [_BY_PATTERN[p] for p in site.patterns if p in _BY_PATTERN]
    backward = site.role != "forward"
    found = _steps(site, program, quiet=bool(named), backward=backward)
    rows = sum(r.axis == "row" for r in program.reduces)
    columns = len(program.reduces) - rows
    found += named
    found += ["row statistics"] * bool(rows) + ["column sums"] * bool(columns)
    return list(dict.fromkeys(found)) or ["cast"]


def _steps(site: SiteReport, program: EpilogueProgram, *, quiet: bool, backward: bool) -> list[str]:
    """``quiet``: a pattern's name stands for the arithmetic, only additions are worth saying."""
    kinds = {o.name: o.kind for o in program.operands}
    ops = {s.op for s in program.steps}
    found = []
    for step in program.steps:
        arg = next((a for a in step.args if a in kinds), "")
        kind = kinds.get(str(arg))
        if step.op in ("add", "sub") and kind == "tile" and "residual" in site.patterns:
            found.append("+ residual")
        elif step.op in ("add", "sub") and kind == "row" and not backward:
            found.append("+ bias")
        elif step.op == "mul" and kind == "col" and not quiet:
            found.append("* row scale")
        elif step.op == "mul" and kind == "row" and not quiet:
            found.append("* norm weight")
    if not quiet:
        curve = "GELU (tanh)" if sum(s.op == "mul" for s in program.steps) > 2 else "tanh"
        names = (("erf", "GELU"), ("tanh", curve), ("sigmoid", "SiLU"), ("relu", "ReLU"),
                 ("exp", "exp"))  # fmt: skip
        after = " gradient" if backward else ""
        found += [f"{name}{after}" for op, name in names if op in ops]
        found += ["rotation"] if "swap" in ops else []
    elif any(k == "col" for k in kinds.values()) and program.paired:
        found.insert(0, "* row scale")
    return found


def kernel_title(
    kernel: Kernel, *, backward: bool, small: bool = False, residuals: frozenset[str] = frozenset()
) -> str:
    """What a kernel without a GEMM does. ``small``: it handles vectors only. ``residuals``: the
    modules whose product meets a residual."""
    targets = kernel.targets
    if kernel.kind == "attention":
        return "attention gradient" if backward else "attention"
    if kernel.kind != "memory":
        name = next(iter(targets), "kernel").strip("_")
        return "attention product" if name == "bmm" else name.replace("_", " ")
    words = _forward_words(kernel, residuals)
    if not backward:
        return " + ".join(words) or _ops(kernel)
    if kernel.bytes and words and set(words) <= {"copy", "concatenate"}:
        return " + ".join(words)
    if "rotary" in words:
        return "rotary gradient"
    if small:
        return "finish sums" if set(targets) <= _SUMS else "row factors"
    where = _modules(kernel)
    return f"{where} gradient" if where else _ops(kernel)


def _forward_words(kernel: Kernel, residuals: frozenset[str]) -> list[str]:
    targets = kernel.targets
    words = []
    for group in _BY_OPS:
        words += [name for ops, name in group if targets.keys() >= set(ops.split())][:1]
    products = (module_path(node) for node in kernel.reads if node.target in GEMMS)
    residual = targets["add"] and residuals.intersection(products)
    words = ["dropout"] * _drops(kernel) + ["residual"] * bool(residual) + words
    if not words and set(targets) <= _COPIES:
        words.append("concatenate" if targets["cat"] else "copy" if targets["clone"] else "cast")
    return words


def _drops(kernel: Kernel) -> bool:
    random = ("rand", "bernoulli", "native_dropout")
    return any(
        name in str(source.target).split(".")
        for node in kernel.nodes
        for mask in (node, *map(base, node.all_input_nodes))
        for source in (mask, *mask.all_input_nodes)
        for name in random
    )


def _modules(kernel: Kernel) -> str:
    """The innermost modules that its ops came from, the commonest two."""
    paths = [p for p in map(module_path, kernel.nodes) if p]
    names = list(dict.fromkeys(leaf(p) for p in paths))
    inner = [n for n in names if not n.rpartition(".")[2].isdigit()]
    return " + ".join((inner or names)[:2])


def _ops(kernel: Kernel) -> str:
    if set(kernel.targets) == {"mul"}:
        return "scale"
    return ", ".join(t for t, _ in kernel.targets.most_common(3))
