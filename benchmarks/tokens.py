# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens, with their entropies, by a head of a large vocabulary: TRL's own
function, which works in chunks, beside the same results in plain operations.

``python -m benchmarks tokens OUT.json`` times all in turn, there and back, sustained, with peaks
over the head and its input and errors against float32. ``trl`` 1.16 is needed for its own.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coda_inductor.backend import coda
from coda_inductor.trl import Head

from . import environment, worth
from .measure import Variants, in_turns, own, parser, peak_mib, relative_error

TURNS = 4
CHUNK = 32768  # columns, as TRL's trainers pass it
#: Name -> what is computed beside log-probabilities, and does it train?
CASES: dict[str, tuple[tuple[str, ...], bool]] = {
    "reference policy": (("entropy",), False),
    "policy": (("entropy",), True),
    "SFT": (("entropy", "is_top1"), True),
}


def call_of(
    apply: Any, outputs: tuple[str, ...], *, train: bool, entropy: float
) -> Callable[..., Any]:
    """A function of the head's input, weight and targets: results, or a loss to differentiate."""

    def call(h: Tensor, w: Tensor, targets: Tensor) -> Any:
        found = apply(h, w, None, targets, 1.0, CHUNK, None, 1.0, outputs)
        if not train:
            return found[:2]
        loss = -found[0].mean() - (entropy * found[1].mean() if entropy else 0.0)
        return loss, tuple(x.detach().sum() for x in found[1:] if x is not None)

    return own(call)


def prepared(name: str, size: tuple[int, int, int]) -> tuple[Variants, dict[str, Any]]:
    """All variants of a case, each compiled and run once; their errors and peaks."""
    outputs, train = CASES[name]
    tokens, width, vocabulary = size
    torch.manual_seed(0)
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    h = torch.randn(tokens, width, **like).requires_grad_(train)
    w = (torch.randn(vocabulary, width, **like) * (2 / width**0.5)).requires_grad_(train)
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    how: dict[str, Any] = {"train": train, "entropy": 0.01 if name == "policy" else 0.0}

    def runs(call: Callable[..., Any], h: Tensor = h, w: Tensor = w) -> Callable[[], Any]:
        def run() -> Any:
            if not train:
                with torch.no_grad():
                    return call(h, w, targets)
            h.grad = w.grad = None
            loss, _ = call(h, w, targets)
            loss.backward()
            return loss.detach(), h.grad, w.grad

        return run

    def plain(**compiler: Any) -> Callable[[], Any]:
        call = call_of(Head.apply, outputs, **how)
        return runs(torch.compile(call, dynamic=False, **compiler) if compiler else call)

    def chunked() -> Callable[[], Any]:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        return runs(call_of(ChunkedLogProbFunction.apply, outputs, **how))

    def products() -> Callable[[], Any]:
        dz = torch.randn(tokens, vocabulary, **like)
        left, right = h.detach(), w.detach()

        def run() -> None:
            F.linear(left, right)
            if train:
                dz @ right, dz.t() @ left

        return run

    exact = h.detach().float().requires_grad_(train), w.detach().float().requires_grad_(train)
    want = runs(call_of(Head.apply, outputs, **how), *exact)()
    torch.cuda.empty_cache()
    variants, facts = Variants(), {}
    variants.add("TRL", chunked)
    variants.add("eager", plain)
    variants.add("torch.compile", lambda: plain(backend="inductor"))
    variants.add("coda", lambda: plain(backend=coda))
    for each, call in variants.calls.items():
        errors = [relative_error(x, y) for x, y in zip(call(), want, strict=True)]
        h.grad = w.grad = None
        peak = peak_mib(call)
        facts[each] = {"errors": errors, "peak_gib": peak and peak / 2**10}
        torch.cuda.empty_cache()
    del want, exact
    variants.add("products alone", products)
    return variants, facts


def main(arguments: list[str]) -> None:
    """Measure all cases into a file."""
    options = parser("tokens", __doc__)
    options.add_argument("--case", action="append", choices=CASES, help="repeatable")
    options.add_argument("--size", type=int, nargs=3, default=(8192, 4096, 151936),
                         help="tokens, width and vocabulary")  # fmt: skip
    given = options.parse_args(arguments)
    about = environment.describe(sys.argv[1:], given.commit, "benchmarks.tokens")
    found: dict[str, Any] = {"environment": about, "size": list(given.size), "results": {}}
    for name in given.case or CASES:
        variants, facts = prepared(name, tuple(given.size))
        samples: dict[str, list[float]] = {each: [] for each in variants.calls}
        for each in in_turns([*samples], TURNS):
            call = variants.calls[each]
            ms = variants.attempt(each, lambda call=call: worth.sustained(call, 0.2, 0.3))
            samples[each] += [] if ms is None else [ms]
        found["results"][name] = {
            each: {"ms": statistics.median(times), "samples": times, **facts.get(each, {})}
            for each, times in samples.items() if times
        } | {each: {"failed": text} for each, text in variants.errors.items()}  # fmt: skip
        print(name, json.dumps(found["results"][name]), flush=True)
        given.file.write_text(json.dumps(found, indent=1))
