# SPDX-License-Identifier: Apache-2.0
"""Memory, errors, variants of which one may fail, and what commands and their loops share."""

import argparse
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tabulate import tabulate

from .environment import scrub

Call = Callable[[], Any]
Result = TypeVar("Result")


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """The arguments of ``python -m benchmarks NAME FILE``."""
    parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=about)
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit", help="measured commit, where the tree is a copy without .git")
    return parser


def in_turns(items: Sequence[Any], turns: int) -> Iterator[Any]:
    """``items`` so many times, there and back."""
    for turn in range(turns):
        yield from items if turn % 2 == 0 else reversed(items)


def own(function: Any) -> Any:
    """``function`` with a code object of its own, by which Dynamo keeps what it compiled."""
    code, cells = function.__code__.replace(), function.__closure__
    return types.FunctionType(code, function.__globals__, None, None, cells)


def device() -> str:
    """``"cuda"`` where there is a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the device; raises what an earlier asynchronous call did wrong."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def mark() -> torch.cuda.Event:
    """An event at the end of what is queued."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def peak_mib(call: Call) -> float | None:
    """MiB that one call needs beyond what is allocated before it; None on a CPU."""
    if device() == "cpu":
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `reference` (same shape); computed in fp32."""
    difference = value.float() - reference.float()
    return (difference.norm() / reference.float().norm()).item()


def table(rows: list[list[str]], headers: list[str], form: str) -> str:
    """``tabulate`` with every cell as it is."""
    return tabulate(rows, headers=headers, tablefmt=form, disable_numparse=True, stralign="right")


def _reason(error: BaseException) -> str:
    """One line for a results file: kind and message, without Dynamo's advice on how to debug."""
    text = f"{type(error).__name__}: {error}".split("\n\nSet TORCHDYNAMO_VERBOSE")[0]
    return scrub(" ".join(text.split()))[:600]


class Variants:
    """The calls of one comparison. A variant that fails leaves its error text; the others go on.

    Attributes:
        calls: name -> a callable that works.
        errors: name -> why there is none.
    """

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.errors: dict[str, str] = {}

    def attempt(self, name: str, work: Callable[[], Result]) -> Result | None:
        """`work()`, or None with the reason in `errors`; None also for a name that has one. Raises
        what the device raises if the failure also broke the CUDA context."""
        if name in self.errors:
            return None
        result = None
        try:
            result = work()
            synchronize()
        except Exception as error:  # noqa: BLE001  what it raises is its result
            traceback.print_exc()
            self.errors[name] = _reason(error)
            synchronize()
        return result

    def add(self, name: str, make: Callable[[], Call]) -> None:
        """Prepare the variant `make()`, call it once and keep it under `name`."""

        def prepare() -> Call:
            call = make()
            call()
            return call

        if (call := self.attempt(name, prepare)) is not None:
            self.calls[name] = call
