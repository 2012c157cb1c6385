# SPDX-License-Identifier: Apache-2.0
"""Prove a pattern file and try it: match, algebra, kernel.

Exit code 0 if everything passes, 1 if anything fails, 2 if there is no such file. No GPU is needed.
A folder means all pattern files in it. Each result is one line of any length, for grep and diff.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coda_inductor.codegen.render import render
from coda_inductor.errors import OptionError, PatternError
from coda_inductor.options import parse
from coda_inductor.patterns import Pattern
from coda_inductor.patterns.loading import expand, name_taken, read
from coda_inductor.patterns.loading import run as patterns_in
from coda_inductor.patterns.meaning import Signature
from coda_inductor.patterns.prove import prove
from coda_inductor.record import Record
from coda_inductor.semantic.define import parameters
from coda_inductor.tracing import dry_run

HELP = "prove a pattern file and try it"
#: The rewritten graph in float64 against the original, relative to the largest element.
TOLERANCE = 1e-10
_OUTCOMES = {True: "pass", False: "fail"}
#: Sizes of the example: rows, and columns in front of and behind the first GEMMs.
ROWS, K, N = 24, 32, 40
#: All of a result but the pattern: its check, outcome, detail and, perhaps, listings.
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    """The result of one check. ``outcome`` is "pass", "fail", "skip", or "note" (information for
    the author); ``listings`` are pairs (title, source)."""

    pattern: str
    check: str
    outcome: str
    detail: str
    listings: tuple[tuple[str, str], ...] = ()


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a pattern file, or a folder of them"
    )
    parser.add_argument("--json", action="store_true", help="print only the results, as JSON")
    parser.add_argument("--must-pay", action="store_true",
                        help="fail where the plan says that a pattern brings nothing")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print no programs or kernel sources")


def run(arguments: argparse.Namespace) -> int:
    """Check every file. Returns 0 if all checks pass, 1 if any fails. Raises OptionError if there
    is no such file, or a folder has no pattern file."""
    results: list[Result] = []
    try:
        files = [file for path in arguments.files for file in expand(path)]
    except PatternError as error:
        raise OptionError(str(error)) from None
    for path in files:
        rows = list(check_file(path))
        if arguments.must_pay:
            rows = [replace(r, outcome="fail") if r.check == "plan" and r.outcome == "note" else r
                     for r in rows]  # fmt: skip
        results += rows
        if not arguments.json:
            sys.stdout.writelines(_lines(path, rows, quiet=arguments.quiet))
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    return int(any(r.outcome == "fail" for r in results))


def _lines(path: Path, results: list[Result], *, quiet: bool) -> Iterator[str]:
    for title, text in () if quiet else (listing for r in results for listing in r.listings):
        yield f"--- {title}\n{text.rstrip()}\n\n"
    yield f"{path}\n"
    several = len({r.pattern for r in results}) > 1
    width = max(len(r.check) for r in results)
    for r in results:
        name = f"{r.pattern}  " if several else ""
        yield f"{name}{r.check:<{width}}  {r.outcome}  {' '.join(r.detail.split())}\n"
    yield f"{_total(results)}\n\n"


def _total(results: list[Result]) -> str:
    """The last line of the output. It says ``all passed`` only if no check was skipped, because
    then the pattern was tried, not only proven."""
    counts = Counter(r.outcome for r in results)
    if not counts["fail"] and not any(r.check.startswith("match") for r in results):
        return f"{counts['pass']} passed, {counts['skip']} skipped: proven, but never tried"
    if counts.keys() == {"pass"}:
        return "all passed"
    words = {"fail": "failed", "pass": "passed", "note": "noted", "skip": "skipped"}
    return ", ".join(f"{counts[key]} {word}" for key, word in words.items() if counts[key])


def check_file(path: Path) -> Iterator[Result]:
    """Every check of every pattern in a file."""
    try:
        patterns = patterns_in(read(path))
    except PatternError as error:
        yield Result(path.stem, "proof", "fail", str(error))
        return
    for pattern in patterns:
        yield from (Result(pattern.name, *row) for row in _checks(pattern, path))


def _checks(pattern: Pattern, path: Path) -> Iterator[Row]:
    if (why := name_taken(path, pattern.name)) is not None:
        yield "name", "fail", why
        return
    claims: list[str] = []
    try:
        prove(pattern, claims.append)
    except Exception as error:
        yield from (("proof", "pass", claim) for claim in claims[:-1])
        yield "proof", "fail", str(error) if isinstance(error, PatternError) else _error_text(error)
        return
    yield from (("proof", "pass", claim) for claim in claims)
    if not example_of(pattern):
        why = "the pattern has no example: a shape for each tensor, a value for each number"
        yield "example", "skip", why
        return
    yield from _try(pattern, str(path))


def _try(pattern: Pattern, path: str) -> Iterator[Row]:
    reasons = {idiom: cannot_run(pattern, idiom) for idiom in pattern.idioms}
    runs = [idiom for idiom, why in reasons.items() if why is None]
    for idiom in (f for f in pattern.idioms if f not in runs):
        outcome = "skip" if pattern.meaning is None else "fail"
        yield f"run {idiom.__name__}", outcome, reasons[idiom]
    steps = [(f.__name__, _idiom, f) for f in runs] + [("kernel", _kernel, f) for f in runs[:1]]
    for name, step, idiom in steps:
        try:
            yield from step(pattern, path, idiom)
        except Exception as error:
            yield name, "fail", _error_text(error)


def _error_text(error: Exception) -> str:
    """The error's class and the first line of its message: messages of torch fill a page."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _idiom(pattern: Pattern, path: str, idiom: Callable[..., Any]) -> Iterator[Row]:
    """Check that GEMMs absorb the idiom and that the rewritten graph is the same function."""
    trial = try_out(pattern, path, idiom, dtype=torch.float64)
    name = idiom.__name__
    text = "found in its example" if trial.raised == 1 else f"found {trial.raised} times, not once"
    yield f"match {name}", _OUTCOMES[trial.raised == 1], text
    yield f"fires {name}", *_fired(pattern, trial)
    if not trial.raised:
        yield f"float64 {name}", "skip", "nothing was rewritten, so there is nothing to compare"
        return
    pairs = zip(trial.results, trial.eager, strict=True)
    error = max(((have - want).abs().max() / want.abs().max()).item() for have, want in pairs)
    text = f"output and {len(trial.eager) - 1} gradients within {error:.1e}"
    yield f"float64 {name}", _OUTCOMES[error <= TOLERANCE], f"{text} (limit {TOLERANCE:.0e})"


def _fired(pattern: Pattern, trial: "Trial") -> tuple[str, str]:
    """(outcome, the ops that GEMMs absorbed). The rewrite of an op may have conditions that its
    example, with one GEMM on either side, does not meet. That is reported, but is not a failure."""
    fired = trial.record.report.fired
    counted = {key: times for key, times in fired.items() if key.startswith(pattern.name)}
    text = ", ".join(f"{times} x {key}" for key, times in counted.items()) or "nothing"
    missing = sorted({pattern.name, f"{pattern.name}_backward"} - set(counted))
    text += f"; no GEMM absorbs {', '.join(missing)}" if missing else ""
    text += f"; left to Inductor: {', '.join(sorted(set(trial.left)))}" if trial.left else ""
    refused = trial.record.report.near_misses
    text += f". Refused: {'; '.join(refused)}" if refused else ""
    excused = pattern.meaning is None and refused
    return ("pass" if not missing else "skip" if excused else "fail"), text


def _kernel(pattern: Pattern, path: str, idiom: Callable[..., Any]) -> Iterator[Row]:
    """Show the epilogue programs in bfloat16 and the source of their kernels. Check that GEMMs move
    no more bytes and absorb no fewer ops than with the pattern disabled, when its ops are plain
    ones. An equal number of bytes is a note: the pattern saves nothing."""
    trial = try_out(pattern, path, idiom, dtype=torch.bfloat16)
    listings = tuple(
        (f"{' + '.join(site.patterns)}, {site.role}, in bfloat16", render(site.program))
        for site in trial.record.report.sites
        if site.program is not None and any(p.startswith(pattern.name) for p in site.patterns)
    )
    text = f"{len(listings)} epilogues render, as shown" if listings else "no GEMM absorbs it"
    outcome = "pass" if listings else _fired(pattern, trial)[0]
    yield "kernel source", outcome, text, listings
    if pattern.meaning is None or not listings:
        why = "an op's rewrite saves work outside of GEMMs, which this check does not count"
        yield "plan", "skip", why if listings else text
        return
    bare = try_out(pattern, path, idiom, dtype=torch.bfloat16, disable=(pattern.name,))
    worse = trial.traffic > bare.traffic or (trial.left and trial.absorbed < bare.absorbed)
    texts = (f"GEMMs move {t.traffic} bytes and absorb {t.absorbed} ops" for t in (trial, bare))
    text = "; without the pattern ".join(texts)
    if not worse and trial.traffic == bare.traffic:
        yield "plan", "note", f"brings nothing: the fuser does this without the file ({text})"
    else:
        yield "plan", _OUTCOMES[not worse], text


class Example(nn.Module):
    """``idiom``, one spelling of a pattern, in the smallest graph around it: its tensors come from
    GEMMs of one input, and a GEMM reads the result: ``idiom(x @ w0, x @ w1) @ down``. Inputs are
    ``ROWS`` x ``K``, tensors ``ROWS`` x ``N``. ``example``: a shape for each tensor and a value for
    each number, by parameter. Tensors shaped like the first one are results of GEMMs; others are
    parameters of N columns."""

    def __init__(self, idiom: Callable[..., Tensor], example: Mapping[str, Any]):
        super().__init__()
        names = parameters(idiom)
        shapes = {p: tuple(example[p]) for p in names if isinstance(example[p], (tuple, list))}
        first = next(iter(shapes.values()))
        self.idiom = idiom
        self.numbers = {p: example[p] for p in names if p not in shapes}
        self.inputs = [p for p, shape in shapes.items() if shape == first]
        self.weights = nn.ParameterDict({p: torch.randn(K, N) * K**-0.5 for p in self.inputs})
        self.others = nn.ParameterDict(
            {p: torch.randn(*(N for _ in s)) for p, s in shapes.items() if p not in self.inputs}
        )
        self.down = nn.Parameter(torch.randn(N, K) * N**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Run the example: (ROWS, K) -> (ROWS, K)."""
        projections = {p: x @ self.weights[p] for p in self.inputs}
        others = {p: self.others[p] for p in self.others}
        return self.idiom(**projections, **others, **self.numbers) @ self.down


def example_of(pattern: Pattern) -> dict[str, Any]:
    """The pattern's example, completed from its meaning: shapes, and for numbers 1.5, 1.75, ..."""
    example = dict(pattern.examples[0]) if pattern.examples else {}
    if pattern.meaning is not None:
        signature = Signature(pattern.meaning)
        for i, name in enumerate(signature.names):
            value = 1.5 + 0.25 * i if signature.is_number(name) else (ROWS, N)
            example.setdefault(name, value)
    return example


def cannot_run(pattern: Pattern, idiom: Callable[..., Tensor]) -> str | None:
    """Why the example does not run with ``idiom``, or None: some idioms are only for matching."""
    try:
        Example(idiom, example_of(pattern))(torch.randn(ROWS, K))
    except Exception as error:
        return f"its example does not run: {type(error).__name__}: {error}"
    return None


class Trial:
    """One run: a torch.compile backend that runs our passes, then the aten graphs eagerly.

    Attributes:
        results, eager: the output and the gradients, with our passes and without.
        raised: how often the pattern's op was put into Dynamo's graph.
        left: the pattern's aten ops that no GEMM absorbed.
        record: has the report, of GEMMs, near misses and the counts of rewrites.
    """

    def __init__(self, pattern: Pattern, path: str, disable: tuple[str, ...]):
        self.pattern, self.raised = pattern, 0
        self.left: list[str] = []
        self.results: list[Tensor] = []
        self.eager: list[Tensor] = []
        options = {"strict": True, "patterns": [path], "disable": list(disable)}
        self.record = Record(parse(None, options), "check")

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        traced = dry_run(gm, inputs, self.record)
        self.raised += sum(node.target is self.pattern.op for node in gm.graph.nodes)
        for node in traced.whole.nodes:
            name, _ = node.meta.get("coda_pattern", ("", ""))
            if name.startswith(self.pattern.name) and torch.Tag.pointwise in node.target.tags:
                self.left.append(str(node.target))
        return traced.call

    @property
    def traffic(self) -> int:
        """The bytes that GEMMs read and write."""
        return sum(site.bytes_after for site in self.record.report.sites)

    @property
    def absorbed(self) -> int:
        """The number of ops that run in the epilogues of GEMMs."""
        return sum(len(site.absorbed) for site in self.record.report.sites)


def try_out(
    pattern: Pattern, path: str, idiom: Callable[..., Tensor], *, dtype: torch.dtype,
    disable: tuple[str, ...] = (),
) -> Trial:  # fmt: skip
    """Run the example with ``idiom``, in ``dtype``. The names in ``disable`` are disabled. Raises
    CodaError: whatever fails inside the passes."""
    torch.manual_seed(0)
    model = Example(idiom, example_of(pattern)).to(dtype)
    x, dy = (torch.randn(ROWS, K, dtype=dtype) for _ in range(2))
    trial = Trial(pattern, path, disable)
    torch.compiler.reset()
    trial.results = step(torch.compile(model, backend=trial), model, x, dy)
    trial.eager = step(model, model, x, dy)
    return trial


def step(function: Callable[..., Tensor], model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Forward and backward: the output, the gradients of ``x`` and of the model's parameters."""
    x = x.clone().requires_grad_()
    output = function(x)
    return [output.detach(), *torch.autograd.grad(output, [x, *model.parameters()], dy)]
