# SPDX-License-Identifier: Apache-2.0
"""torch's own epilogues beside ours: what each can say, and how fast.

``python -m benchmarks flex OUT.json`` (torch 2.15 or newer) compiles five epilogues by torch's
``flex_gemm`` on the QuACK that it vendors, by Inductor, by Inductor with all its GEMM backends
(``max_autotune``), and by coda, and times them in turns. What cannot be expressed is its error.
"""

import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import environment, worth
from .measure import Variants, in_turns, own, parser, relative_error

TURNS = 4
#: Columns of a partial.
GROUP = 64
#: (M, N, K) of a case: products of an 8B Llama.
SHAPES = {
    "residual, sums of squares": (8192, 4096, 4096),
    "rows and columns scaled": (8192, 6144, 4096),
    "gate": (8192, 14336, 4096),
    "gate, adjacent columns": (8192, 28672, 4096),
    "log-sum-exp": (8192, 32128, 4096),
}
#: What Inductor asks for with each of its backends; "plain" is its default.
BACKENDS = ("ATEN", "TRITON", "CUTLASS", "NVGEMM")


def epilogues(name: str, x: Tensor, row: Tensor, column: Tensor) -> Callable[[Tensor], Any]:
    """What follows a product (M, N): x is (M, N), row (N,), column (M, 1) in float32."""
    made: dict[str, Callable[[Tensor], Any]] = {
        "residual, sums of squares": lambda acc: (
            (acc + x, ((acc + x).float() ** 2).sum(-1, keepdim=True))
        ),
        "rows and columns scaled": lambda acc: (acc * column * row).to(acc.dtype),
        "gate": lambda acc: F.silu(x) * acc,
        "gate, adjacent columns": lambda acc: (
            F.silu(acc.view(acc.shape[0], -1, 2)[..., 0]) * acc.view(acc.shape[0], -1, 2)[..., 1]
        ),
        "log-sum-exp": lambda acc: (acc, torch.logsumexp(acc.float(), -1, keepdim=True)),
    }
    return made[name]


def partials(name: str, x: Tensor) -> tuple[Callable[[Tensor], Any], Callable[..., Any]] | None:
    """As ``flex_gemm`` takes a reduction over rows: partials of groups of columns, which a kernel
    behind it reduces. None for epilogues without one."""

    def squares(acc: Tensor) -> Any:
        y = acc + x
        return y, (y.float() ** 2).view(y.shape[0], -1, GROUP).sum(-1)

    def exponents(acc: Tensor) -> Any:
        return acc, torch.logsumexp(acc.float().view(acc.shape[0], -1, GROUP), -1)

    if name == "residual, sums of squares":
        return squares, lambda y, sums: (y, sums.sum(-1, keepdim=True))
    if name == "log-sum-exp":
        return exponents, lambda z, parts: (z, torch.logsumexp(parts, -1, keepdim=True))
    return None


def prepared(name: str) -> tuple[Variants, dict[str, float]]:
    """One case by all compilers, each compiled and run once; errors against float32."""
    m, n, k = SHAPES[name]
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(m, k, **like), torch.randn(n, k, **like).t() / k**0.5
    x, row = torch.randn(m, n, **like), torch.randn(n, **like)
    column = torch.rand(m, 1, device="cuda") + 0.5
    epilogue, grouped = epilogues(name, x, row, column), partials(name, x)

    def plain(a: Tensor, b: Tensor) -> Any:
        return epilogue(a @ b)

    def flex(a: Tensor, b: Tensor) -> Any:
        from torch._higher_order_ops.flex_gemm import flex_gemm

        how = {"backend": "QUACK"}
        if grouped is None:
            return flex_gemm(torch.mm, (a, b), epilogue, kernel_options=how)
        return grouped[1](*flex_gemm(torch.mm, (a, b), grouped[0], kernel_options=how))

    def compiled(function: Any, settings: dict[str, Any], **how: Any) -> Callable[[], Any]:
        call = torch.compile(own(function), dynamic=False, **how)

        def run() -> Any:
            with torch.no_grad(), torch._inductor.config.patch(settings):
                return call(a, b)

        return run

    variants = Variants()
    every = {"max_autotune": True, "max_autotune_gemm_backends": ",".join(BACKENDS)}
    variants.add("cuBLAS alone", lambda: lambda: torch.mm(a, b))
    variants.add("flex_gemm", lambda: compiled(flex, {}))
    variants.add("Inductor", lambda: compiled(plain, {}))
    variants.add("Inductor, all backends", lambda: compiled(plain, every))
    variants.add("coda", lambda: compiled(plain, {}, backend="coda", options={"gate": "always"}))
    want, errors = torch.utils._pytree.tree_leaves(plain(a.float(), b.float())), {}
    for each, call in variants.calls.items():
        have = torch.utils._pytree.tree_leaves(call())
        if each != "cuBLAS alone":
            errors[each] = max(relative_error(h, w) for h, w in zip(have, want, strict=True))
    return variants, errors


def main(arguments: list[str]) -> None:
    """Measure all cases into a file."""
    options = parser("flex", __doc__)
    options.add_argument("--case", action="append", choices=SHAPES, help="repeatable")
    given = options.parse_args(arguments)
    about = environment.describe(sys.argv[1:], given.commit, "benchmarks.flex")
    found: dict[str, Any] = {"environment": about | {"torch": torch.__version__}, "results": {}}
    for name in given.case or SHAPES:
        variants, errors = prepared(name)
        samples: dict[str, list[float]] = {each: [] for each in variants.calls}
        for each in in_turns([*samples], TURNS):
            with contextlib.suppress(RuntimeError):
                samples[each].append(worth.sustained(variants.calls[each], 0.2, 0.3))
        results = {
            each: {"ms": statistics.median(times), "samples": times, "error": errors.get(each)}
            for each, times in samples.items()
        }
        found["results"][name] = results | {e: {"failed": t} for e, t in variants.errors.items()}
        print(name, json.dumps(found["results"][name]), flush=True)
        given.file.write_text(json.dumps(found, indent=1))
