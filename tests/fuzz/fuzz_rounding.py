# SPDX-License-Identifier: Apache-2.0
"""Are rounding errors as small as torch.compile's or eager's? The promise is at most ``FACTOR``
times the larger, for every output and gradient of a program in bfloat16, in float32, or in float32
under autocast.

The truth is the same text in float64, on the same rounded inputs. One draw of numbers says little:
what exceeds the bound is drawn again, up to as often as ``DRAWS`` says at each stage, and root mean
squares are compared. In some programs few elements make the error of every gradient, so that 64
draws say little as well: seed 920615 has 1.29 times eager's after 64, 1.11 after 260.
"""

import functools
import math
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fuzz_oracle import LIMIT, Outcome, TooSlowError, environment, time_limit
from fuzz_program import Program
from harness import Harness, Stock
from torch._dynamo.utils import counters

FACTOR = 1.2
DRAWS = (8, 64, 256)
#: Kinds of arithmetic: names of ``low`` and ``high``.
KINDS = (("bfloat16", "float32"), ("bfloat16", "float32"), ("float32", "float32"))
#: Relative errors that count as none: what one rounding of a result can make of it, and in float32
#: the order of a sum.
FLOOR = {"bfloat16": 2.0**-9, "float32": 8 * 2.0**-24}


def in_arithmetic(program: Program, seed: int) -> Program:
    low, high = KINDS[seed % len(KINDS)]
    body = program.body
    if low == "float32" and seed % 2:  # to bfloat16 autocast adds nothing
        body = f'with torch.autocast("cpu", torch.bfloat16):\n{textwrap.indent(body, "    ")}'
    return replace(program, body=body, low=low, high=high)


def judge(program: Program, limit: float = LIMIT) -> Outcome:
    """Whether errors are in bounds, with the kernels' numerics and with those of plain ops; a
    failure begins with "rounding"."""
    outcome = Outcome()
    with environment(program):
        for reference in (True, False):
            try:
                _measure(program, reference, limit, outcome)
            except TooSlowError:
                outcome.failure = f"too slow: not compiled after {limit:g} s of CPU time"
            if outcome.failure or outcome.invalid:
                break
    return outcome


def judge_bits(program: Program, limit: float = LIMIT) -> Outcome:
    """Whether ``numerics="eager"`` has the bits of torch.compile's graph, run op by op. No site
    stays a custom op: its accumulators are sums in another order than bfloat16's on a CPU."""
    program, harness = replace(program, custom=False), Harness(numerics="eager")
    with environment(program):
        try:
            run = Runs(program)
            want = run("stock", Stock())
        except Exception as error:
            return Outcome(invalid=f"torch.compile without us: {error}")
        try:
            with time_limit(limit):
                have = run("ours", harness)
        except (Exception, TooSlowError) as error:
            return Outcome(f"exception {type(error).__name__}: {error}")
    wrong = [n for n in want if not torch.equal(have[n].nan_to_num(7), want[n].nan_to_num(7))]
    failure = f"rounding: other bits in {', '.join(wrong)}" if wrong else ""
    return Outcome(failure, counts=Counter({"fused with bits": len(harness.fused)}))


def _measure(program: Program, reference: bool, limit: float, outcome: Outcome) -> None:
    try:
        run = Runs(program)
        truth, eager = run("truth"), run("eager")
    except Exception as error:
        outcome.invalid = f"eager: {type(error).__name__}: {error}"
        return
    counters.clear()
    try:
        with time_limit(limit):
            ours = run("ours", Harness(reference=reference))
    except Exception as error:
        outcome.failure = f"exception {type(error).__name__}: {error}"
    outcome.counts.update(counters["coda"])
    suspects = functools.partial(_suspects, run.floor, {n: t.numel() for n, t in truth.items()})
    if not outcome.failure and not suspects(_squares(truth, ours, eager, eager), 1):
        return  # within eager's, so that torch.compile's need not be known
    try:
        plain = run("stock", Stock())
    except Exception as error:
        outcome.invalid, outcome.failure = f"torch.compile without us: {error}", ""
        return
    if outcome.failure:
        return
    squares = _squares(truth, ours, eager, plain)
    count, found = 1, suspects(squares, 1)
    for most in DRAWS if found else ():
        for draw in range(count, most):
            new = _squares(*(run(who, draw=draw) for who in ("truth", "ours", "eager", "stock")))
            # A gradient that is zero in one draw (a saturated softmax) is not among its results.
            squares = {n: [a + b for a, b in zip(squares[n], new.get(n, (0.0,) * 4), strict=True)]
                       for n in squares}  # fmt: skip
        count, found = most, suspects(squares, most)
        if not found:
            break
    for name in found:
        *errors, size = squares[name]
        mine, eagers, stocks = ((e / size) ** 0.5 for e in errors)
        outcome.failure += (
            f"rounding: {name} {mine:.2g}, eager's {eagers:.2g}, torch.compile's {stocks:.2g}; "
        )


class Runs:
    """Calls of one program: the truth, eager, and compiled functions, which are compiled once."""

    def __init__(self, program: Program):
        self.program, self.space = program, program.load()
        self.wide = program.load("float64", "float64")
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.floor = FLOOR["bfloat16" if "autocast(" in program.body else program.low]

    def __call__(self, who: str, backend: Any = None, draw: int = 0) -> dict[str, torch.Tensor]:
        """Outputs and gradients, in float64."""
        space = self.wide if who == "truth" else self.space
        program = replace(self.program, seed=self.program.seed + 1000 * draw)
        tensors = (self.space if draw == 0 else program.load())["make"]()
        if who == "truth":  # the same numbers
            tensors = {n: _widened(t) for n, t in tensors.items()}
        call, arguments = space["build"](tensors)
        if backend is not None:
            torch._dynamo.reset()
            self.compiled[who] = torch.compile(
                self.space["function"], backend=backend, dynamic=self.program.dynamic
            )
        if who in self.compiled:
            call, arguments = self.compiled[who], list(tensors.values())
        with torch.set_grad_enabled(self.program.training):
            outputs = list(call(*arguments))
        values = {f"output {i}": t for i, t in enumerate(outputs)}
        if self.program.training:
            gradients = space["differentiate"](outputs, tensors)
            values |= {f"gradient of {n}": g for n, g in zip(tensors, gradients, strict=True)}
        return {
            name: value.detach().double()
            for name, value in values.items()
            if value is not None and value.is_floating_point()
        }


def _widened(t: torch.Tensor) -> torch.Tensor:
    return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t


def _squares(truth: Any, *others: Any) -> dict[str, list[float]]:
    """The squared error of each run, then the squared size of the truth, by tensor."""
    found = {}
    for name, right in truth.items():
        size = right.square().sum().item()
        if right.isfinite().all() and size > 0 and all(name in o for o in others):
            found[name] = [(o[name] - right).square().sum().item() for o in others] + [size]
    return found


def _suspects(
    floor: float, sizes: dict[str, int], squares: dict[str, list[float]], draws: int
) -> list[str]:
    """The tensors whose error is out of bounds, by sums of squares over some draws. Where eager or
    torch.compile has none that is finite, there is no bound. Sums are divided, not draws: a
    gradient that almost cancels has a large relative error in a few draws, which then decide
    (seed 8910154: 2.0 times eager's over 256 draws, and 1.1 times in absolute size)."""
    found = []
    for name, (*errors, size) in squares.items():
        ours, eager, plain = (error / size for error in errors)
        chance = 1 + 2 / (2 * draws * sizes[name]) ** 0.5  # two standard errors of a mean square
        bound = max(FACTOR * chance * max(eager, plain) ** 0.5, floor)
        if not ours**0.5 <= bound and math.isfinite(eager + plain):
            found.append(name)
    return found
