# SPDX-License-Identifier: Apache-2.0
"""What one fused GEMM takes the host, beside torch.mm: microseconds a call, for each kind of site.

    python benchmarks/overhead.py [OUT.json]       # on the GPU; a minute

``python``: the op called from Python; ``direct``: the same without the dispatcher, as generated
code calls it. ``graph``: ten of them, with a weight each, in one graph that Inductor compiled, less
what that graph takes without them, by ten. ``alloc``: the allocation of the outputs, which all of
these contain, by Inductor's own allocator. ``mm`` is torch.mm called from Python, ``mm graph`` ten
of them in a graph. The matrices are small: the GPU never has to be waited for.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import coda_inductor
from coda_inductor.select.config import legal_configs
from coda_inductor.select.kinds import B_MAJOR, TERMS, kinds

SIZE = 256
WEIGHTS = 10
CALLS = 200
ROUNDS = 15


def host_us(call: Callable[[], object]) -> float:
    """Median microseconds of the host, of ``ROUNDS`` times what the GPU's queue holds."""
    rounds = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append(1e6 * (time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return statistics.median(rounds[2:])


def tensors(kind: str, m: int = SIZE, n: int = SIZE, k: int = SIZE):
    """(as_, WEIGHTS times bs, operands) of a call; K is that of each term."""
    program = kinds()[kind]

    def randn(*shape: int, dtype: str = program.a_dtype) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(getattr(torch, dtype))

    def weight() -> torch.Tensor:
        return randn(n, k).t() if B_MAJOR[kind] == "k" else randn(k, n)

    products = TERMS[kind] * len(program.accs)
    sizes = {"tile": (m, n), "row": (len(program.accs) * n,), "col": (m,), "scalar": ()}
    sizes["table"] = m, program.head
    operands = [randn(*sizes[o.kind], dtype=o.dtype) for o in program.operands]
    weights = [[weight() for _ in range(products)] for _ in range(WEIGHTS)]
    return [randn(m, k) for _ in range(TERMS[kind])], weights, operands


def measure(kind: str, products: bool = False) -> dict[str, float]:
    """Microseconds of one kind; with ``products`` torch.mm in a graph too."""
    program = kinds()[kind]
    as_, weights, operands = tensors(kind)
    text, config = program.to_json(), str(legal_configs(program)[0])
    op = torch.ops.coda_inductor.gemm_epilogue.default
    outputs = op(as_, weights[0], operands, text, config, kind, True)
    shapes = [(tuple(x.shape), x.stride(), x.dtype) for x in outputs]
    allocate = torch._C._dynamo.guards._empty_strided_cuda
    us = {
        "python": host_us(lambda: op(as_, weights[0], operands, text, config, kind, True)),
        "mm": host_us(lambda: torch.mm(as_[0], weights[0][0])),
        "alloc": host_us(lambda: [allocate(*how) for how in shapes]),
    }
    if hasattr(op, "direct"):  # not before there were direct calls
        us["direct"] = host_us(
            lambda: op.direct(as_, weights[0], operands, text, config, kind, True)
        )
    none = host_us(graph(lambda a, *_: [a[0]], as_, weights, operands))
    calls = {"graph": lambda a, b, o: op(a, b, o, text, config, kind, True)}
    if products:
        calls["mm graph"] = lambda a, b, _: [torch.mm(a[0], b[0])]
    for name, one in calls.items():
        us[name] = (host_us(graph(one, as_, weights, operands)) - none) / WEIGHTS
    return {name: round(value, 2) for name, value in us.items()}


def graph(one: Callable, as_: Sequence, weights: Sequence, operands: Sequence) -> Callable:
    """A compiled graph of ``one`` with each of the weights; returns all that they return."""
    torch._dynamo.reset()

    def ten(as_, weights, operands):
        return [one(as_, bs, operands) for bs in weights]

    run = torch.compile(ten, fullgraph=True, dynamic=False)
    return lambda: run(as_, weights, operands)


@torch.no_grad()
def overhead(names: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Measure and print all kinds, or those of ``names``."""
    try:  # what a backend of ours has done before Inductor compiles
        from coda_inductor.runtime import direct

        direct.install()
    except ImportError:  # versions before there were direct calls
        pass
    found = {}
    for kind in names or kinds():
        found[kind] = us = measure(kind, products=not found)
        print(f"{kind:<16}" + "".join(f"  {name} {value:6.2f}" for name, value in us.items()))
    return found


if __name__ == "__main__":
    print(Path(coda_inductor.__file__).parent, torch.__version__, "us of the host a call")
    result = overhead()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
