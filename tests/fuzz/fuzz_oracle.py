# SPDX-License-Identifier: Apache-2.0
"""Is a program the same under our passes? Compared are outputs, gradients and changed inputs: their
values (a NaN where eager has one), dtypes, shapes and strides, and who shares memory with whom;
then outputs and inputs of a second call, after the outputs of the first were changed in place.

What differs from eager but not from torch.compile without us is not ours; nor is what eager cannot
run at all. A program has ``LIMIT`` seconds of CPU time: compiling must end.
"""

import contextlib
import copy
import functools
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from checking import leave_custom_ops, slice_logits
from fuzz_program import Program
from harness import Harness, Stock
from torch._dynamo.utils import counters

LIMIT = 30
#: In float64, beside the largest element: a deep program amplifies a difference in the last place,
#: a wrong rewrite is off by 1.
TOLERANCE = 1e-7


class TooSlowError(BaseException):
    """A program had its time. No ``Exception``, because fallbacks catch those on the way."""


@dataclass
class Outcome:
    """What became of a program: what is wrong, or "", of which the first word is the kind, which a
    reduction keeps; why it says nothing (eager or torch.compile without us cannot run it); how
    often which rewrite fired."""

    failure: str = ""
    invalid: str = ""
    counts: Counter = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        return self.failure.split(":")[0]


@dataclass
class Result:
    """Named tensors of one run, and which of them share memory."""

    tensors: dict[str, torch.Tensor | None]
    shared: set[tuple[str, str]]


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """:class:`TooSlowError` after so much CPU time. SIGALRM is pytest-timeout's."""

    def stop(*_: Any) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def environment(program: Program) -> Iterator[None]:
    """Thresholds low, which small programs would never reach; sites left as custom ops where the
    program says so, nothing cached."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("coda_inductor.dynamo.late_gradients.LEAST_BYTES", 0)
        slice_logits(patch, 0)
        patch.setattr("coda_inductor.rewrite.tables.LEAST_READS", 2)
        if program.custom:
            leave_custom_ops(patch, "64x32:1x1:co")
        torch._dynamo.reset()
        try:
            yield
        finally:
            torch._dynamo.reset()


def run(program: Program, namespace: dict[str, Any], backend: Any = None, **options: Any) -> Result:
    """One run, forward and backward; ``backend`` None is eager."""
    tensors = namespace["make"]()
    call, arguments = namespace["build"](tensors)
    if backend is not None:
        torch._dynamo.reset()
        call = torch.compile(call, backend=backend, dynamic=program.dynamic, **options)
    with torch.set_grad_enabled(program.training):
        outputs = list(call(*arguments))
    found = {f"output {i}": t for i, t in enumerate(outputs)}
    inputs = {f"input {name}": t for name, t in tensors.items()}
    shared = _shared({**found, **inputs})
    if program.training:
        found = {name: copy.copy(t) for name, t in found.items()}
        gradients = namespace["differentiate"](outputs, tensors)
        found |= {f"gradient of {n}": g for n, g in zip(tensors, gradients, strict=True)}
    found = {n: None if t is None else t.detach() for n, t in (found | inputs).items()}
    found = {n: copy.deepcopy(t) for n, t in found.items()}  # with their strides
    for t in outputs:
        with contextlib.suppress(RuntimeError):  # elements of one place
            t.detach().zero_()
    with torch.set_grad_enabled(program.training):
        again = {f"again {i}": t.detach() for i, t in enumerate(call(*arguments))}
    return Result(found | again, shared)


def _shared(tensors: dict[str, torch.Tensor]) -> set[tuple[str, str]]:
    place = {n: t.untyped_storage().data_ptr() for n, t in tensors.items() if t.numel()}
    return {(a, b) for a in place for b in place if a < b and place[a] == place[b]}


def judge(
    program: Program,
    limit: float = LIMIT,
    make: Callable[..., Any] = Harness,
    stock: Callable[[], Any] = Stock,
) -> Outcome:
    """Run the program in eager and through our passes, by default without code generation."""
    with environment(program):
        return _judge(program, limit, functools.partial(make, memory=program.memory), stock)


def judge_end_to_end(program: Program) -> Outcome:
    """As :func:`judge`, compiled to the end by our backend, or Inductor's."""

    def make(**options: Any) -> dict[str, Any]:
        return {"backend": "coda", "options": {"strict": True, **options}}

    return judge(program, 10 * LIMIT, make, lambda: "inductor")


def _judge(program: Program, limit: float, make: Any, stock: Any) -> Outcome:
    try:
        namespace = program.load()
        eager = run(program, namespace)
    except Exception as error:
        return Outcome(invalid=f"eager: {type(error).__name__}: {error}")
    outcome = Outcome()
    have, error, outcome.counts = _compiled(program, namespace, make(), limit)
    problems = [error] if have is None else list(differences(have, eager))
    if not problems:
        return outcome
    plain, reason, _ = _compiled(program, namespace, stock(), limit)
    if plain is None:
        outcome.invalid = f"torch.compile without us: {reason}"
    elif have is None:
        outcome.failure = error
    else:
        theirs = {label for label, _ in differences(have, plain)}
        ours = {label for label, _ in problems} & theirs
        outcome.failure = "; ".join(text for label, text in problems if label in ours)
    return outcome


def _compiled(
    program: Program, namespace: dict[str, Any], backend: Any, limit: float
) -> tuple[Result | None, str, Counter]:
    """(result, why there is none, what fired) of one compiled run."""
    counters.clear()
    options = backend if isinstance(backend, dict) else {"backend": backend}
    result, error = None, ""
    try:
        with time_limit(limit):
            result = run(program, namespace, **options)
    except TooSlowError:
        error = f"too slow: not compiled after {limit:g} s of CPU time"
    except Exception as exception:
        error = f"exception {_cause(exception)}: {exception}"
    return result, error, Counter(counters["coda"]) + _found(options["backend"])


def _found(backend: Any) -> Counter:
    """What has no counter: pairs and sums of GEMMs, and semantic ops that were raised."""
    if not isinstance(backend, Harness) or backend.graph is None:
        return Counter()
    raised = [str(n.target) for n in backend.raised.nodes if "coda_inductor" in str(n.target)]
    found = Counter(f"raised {target.split('.')[1]}" for target in raised)
    gemms = [node for node in backend.graph.nodes if "gemm_epilogue" in str(node.target)]
    found["sum"] = sum(len(node.args[0]) > 1 for node in gemms)
    found["pair"] = sum(site.program.paired for site in backend.fused)
    return found


def _cause(error: BaseException) -> str:
    """The class of the first exception in the chain: Dynamo wraps what a backend raises."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return type(error).__name__


def differences(have: Result, want: Result) -> Iterator[tuple[tuple[str, str], str]]:
    """((tensor, aspect), text) of everything that differs."""
    for name, right in want.tensors.items():
        left = have.tensors.get(name)
        if left is None or right is None:
            if left is not right:
                missing = "ours" if left is None else "eager's"
                yield (name, "none"), f"none: {name}, {missing}"
            continue
        for aspect in ("dtype", "shape"):
            mine, eagers = getattr(left, aspect), getattr(right, aspect)
            if mine != eagers:
                yield (name, aspect), f"{aspect}: {name} {mine}, eager's {eagers}"
                break
        else:
            if _strides(name, left) != _strides(name, right):
                yield (name, "stride"), f"stride: {name} {left.stride()}, eager's {right.stride()}"
            if error := _error(left, right):
                yield (name, "value"), f"value: {name} {error}"
    for pair in have.shared ^ want.shared:
        text = "share memory" if pair in have.shared else "share no memory"
        yield (" ".join(pair), "memory"), f"memory: {' and '.join(pair)} {text}, unlike eager's"


def _strides(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that count: as torch compares them, those of a gradient's dimensions of size 1 do
    not, which depend on how many gradients autograd has added up."""
    if not name.startswith("gradient"):
        return tensor.stride()
    return tuple(n for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _error(left: torch.Tensor, right: torch.Tensor) -> str:
    """By how much values differ, or "". NaN equals NaN, infinities those of their sign."""
    if left.dtype == torch.bool or not left.numel():
        return "" if torch.equal(left, right) else "differs"
    left, right = left.double(), right.double()
    special = ~(left.isfinite() & right.isfinite())
    if not torch.equal(left[special].nan_to_num(0.5), right[special].nan_to_num(0.5)):
        return f"{left[special][:4].tolist()} where eager has {right[special][:4].tolist()}"
    left, right = left[~special], right[~special]
    if not left.numel():
        return ""
    # Beside 1: what cancels to rounding noise has no relative error.
    error = ((left - right).abs().max() / (1 + right.abs().max())).item()
    return f"off by {error:.2g}" if error > TOLERANCE else ""
