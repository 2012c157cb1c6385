# SPDX-License-Identifier: Apache-2.0
"""Graphs run on exact numbers: the same graph before and after a pass must give equal fractions.
Inputs are random, so that two different polynomials in them do not agree by chance. A function that
leaves the fractions (rsqrt, exp) gives a random one, the same whenever its argument is the same:
what holds then holds for any function in its place."""

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

import sympy
import torch
from torch.fx import Graph, GraphModule, Interpreter

from coda_inductor.patterns.exact import Exact
from coda_inductor.program import EpilogueProgram, reference
from coda_inductor.runtime.linear_cross_entropy import linear_cross_entropy_backward
from coda_inductor.tracing import trace

aten = torch.ops.aten


def fraction(chance: random.Random) -> Fraction:
    """A random one that is not 0."""
    return Fraction(chance.choice((-1, 1)) * chance.randint(1, 99), chance.choice((1, 2, 4, 8)))


def unknown(*function: Any) -> Fraction:
    """The value of a function, by its name and arguments: random, the same one each time."""
    return fraction(random.Random(repr(function)))  # noqa: S311 (points to test, no secret)


def _exp(x: Fraction) -> Fraction:
    """What programs use of it: it is positive, and exp(-x) = 1 / exp(x)."""
    return abs(unknown("exp", x)) if x >= 0 else 1 / _exp(-x)


def _sigmoid(x: Fraction) -> Fraction:
    return 1 / (1 + _exp(-x))


def _silu_backward(dy: Fraction, x: Fraction) -> Fraction:
    return dy * _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))


class Kernels(Exact):
    """Exact tensors that also know our custom ops, as kernels run them, and results that are
    written where they shall be."""

    specials: ClassVar = {**Exact.specials}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (into := kwargs.pop("out", None)) is not None:
            name, overload = func.name().partition("::")[2].split(".")
            overload = {"out": "default", "IntList_out": "dim_IntList"}[overload]
            return into.write(getattr(getattr(aten, name), overload)(*args, **kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Rational(Kernels):
    """A tensor of fractions."""

    formulas: ClassVar = {
        **Exact.formulas,
        "rsqrt": lambda x: unknown("rsqrt", x), "exp": _exp, "maximum": max, "sigmoid": _sigmoid,
        "silu": lambda x: x * _sigmoid(x), "silu_backward": _silu_backward,
    }  # fmt: skip

    @staticmethod
    def number(x: Any) -> Any:
        return Fraction(x) if isinstance(x, (int, float)) and abs(x) < float("inf") else x

    @classmethod
    def random(cls, shape: Any, seed: int) -> "Rational":
        chance = random.Random(seed)  # noqa: S311
        n = torch.Size(shape).numel()
        return cls.of([fraction(chance) for _ in range(n)], shape, torch.float64)


TILE = 2


def gemm_epilogue(cls: Any, as_: Any, bs: Any, operands: Any, text: str, *_how: Any) -> Any:
    """A fused site as its kernel runs it: tile by tile, the partials of a reduction one a tile, and
    the two weights of a pair read as one, whose rows alternate."""
    program = EpilogueProgram.from_json(text)
    if program.paired:
        as_, bs = paired(cls, as_[0], *bs)
    m, n = as_[0].shape[0], bs[0].shape[1]
    rows = [slice(i, i + TILE) for i in range(0, m, TILE)]
    columns = [slice(j, j + TILE) for j in range(0, n, TILE)]
    lanes = 2 if program.paired else 1

    def run(i: slice, j: slice) -> list[Any]:
        wide = slice(lanes * j.start, lanes * j.stop)
        cut = {"tile": (i, j), "row": (wide,), "col": (i,), "scalar": (), "table": (i,)}
        given = [t[cut[o.kind]] for o, t in zip(program.operands, operands, strict=True)]
        return reference.run(program, [a[i] for a in as_], [b[:, j] for b in bs], given)

    grid = [[run(i, j) for j in columns] for i in rows]
    count = len(program.outputs)  # reductions by row are (M, n_tiles), others (m_tiles, N)
    return [torch.cat([torch.cat([t[k] for t in line], 1) for line in grid]) for k in range(count)]


def paired(cls: Any, a: Any, b0: Any, b1: Any) -> Any:
    """Both accumulators from one product: ``B[(lane, j), k] at w0 + lane * delta + j * ldb + k``
    (``readings.pair``), whose columns 2j and 2j + 1 are those at j. As factors of two products."""
    k, n = b0.shape
    w0, w1 = (cls.exactly(b.t()).elements for b in (b0, b1))
    delta = len(w0) + 3  # the distance of two allocations
    memory = cls.of([*w0, *[None] * 3, *w1], (delta + len(w1),), torch.float64)
    both = memory.as_strided((n, 2, k), (k, delta, 1)).reshape(2 * n, k)
    product = a @ both.t()
    one = cls.exactly(torch.eye(a.shape[0], dtype=torch.float64))
    return [one], [product[:, 0::2], product[:, 1::2]]


def padded(cls: Any, x: Any, pad: Any, value: float = 0.0) -> Any:
    """Columns of ``value`` after those of ``x``."""
    assert pad[0] == 0, "on the right alone"
    return torch.cat([x, cls.exactly(torch.full((*x.shape[:-1], pad[1]), value))], -1)


_largest: dict[Any, sympy.Symbol] = {}


def largest(_cls: Any, x: Exact, dims: Any, keepdim: bool = False) -> Exact:
    """A log-sum-exp takes the largest element away first; any number would do, here a symbol."""
    return x.over(
        dims,
        keepdim,
        lambda items: _largest.setdefault(
            tuple(items), sympy.Symbol(f"largest_{len(_largest)}", real=True)
        ),
    )


def filled(value: int) -> Callable[..., Any]:
    def make(cls: Any, x: Any, size: Any = None, *_: Any, **options: Any) -> Any:
        shape = x.shape if size is None else size
        items = [cls.number(value)] * math.prod(shape)
        return cls.of(items, shape, options.get("dtype") or x.dtype)

    return make


def mm(cls: Any, a: Any, b: Any) -> Any:
    """(M, K) times (K, N)."""
    a, b = cls.exactly(a), cls.exactly(b)
    rows = [a.select(0, i).elements for i in range(a.shape[0])]
    columns = [b.select(1, j).elements for j in range(b.shape[1])]
    items = (sum(x * y for x, y in zip(r, c, strict=True)) for r in rows for c in columns)
    return cls.of(items, (len(rows), len(columns)), a.dtype)


def addmm(_cls: Any, bias: Any, a: Any, b: Any) -> Any:
    return bias + a @ b


Kernels.specials |= {
    **{name: filled(0) for name in ("new_empty", "new_zeros", "zeros_like")},
    "ones_like": filled(1),
    "mm": mm,
    "addmm": addmm,
    "amax": largest,
    "gemm_epilogue": gemm_epilogue,
    "keep": lambda _cls, table: table,
    "constant_pad_nd": padded,
    # It runs as it is written: a slice of the vocabulary at a time.
    "linear_cross_entropy_backward": lambda _cls, *args: linear_cross_entropy_backward(*args),
}


def joint(function: Callable[..., Any], *shapes: Any, graded: bool = True) -> Graph:
    """The joint graph of ``function`` of float64 tensors, as our passes get it."""
    found: list[Graph] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return trace(gm, inputs, lambda graph: found.append(copied(graph))).call

    torch._dynamo.reset()
    inputs = [
        torch.randn(*s, dtype=torch.float64).requires_grad_(graded) if isinstance(s, tuple) else s
        for s in shapes
    ]
    torch.compile(function, backend=backend)(*inputs)
    (graph,) = found
    return graph


def copied(graph: Graph) -> Graph:
    """The same graph once more, in a module of its own."""
    new = Graph()
    new.output(new.graph_copy(graph, {}))
    return GraphModule(torch.nn.Module(), new).graph


def after(graph: Graph, *passes: Callable[[Graph], Any]) -> Graph:
    """A copy of ``graph`` on which the passes have run."""
    new = copied(graph)
    with next(iter(new.nodes)).meta["val"].fake_mode:  # as AOTAutograd has it
        for function in passes:
            function(new)
    new.lint()
    return new


def results(
    graph: Graph, kind: type[Exact] = Rational, point: int = 0, **given: Any
) -> list[list[Any]]:
    """What ``graph`` returns, outputs and gradients, at random fractions or of symbols; ``given``
    by placeholder."""
    inputs = []
    for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        shape = node.meta["val"].shape
        if node.target in given:
            inputs.append(given[node.target])
        elif issubclass(kind, Rational):
            inputs.append(kind.random(shape, 100 * point + i))
        else:
            inputs.append(kind.symbols(node.target, shape))
    found = Interpreter(GraphModule(torch.nn.Module(), graph)).run(*inputs)
    return [kind.exactly(t).elements for t in found if t is not None]
