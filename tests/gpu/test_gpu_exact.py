# SPDX-License-Identifier: Apache-2.0
"""Models of the zoo with kernels, forward and backward: at most 1.2 times the error of the worse of
eager and torch.compile, against float64 (``zoo.edges``). The CPU's tests ask that of the passes."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checking import randn, slice_logits
from layers import compiled
from test_eager import EXACT, small_integers
from test_pass_contract import CASES, Case, same_model
from test_pass_contract import model as model_of
from torch._dynamo.utils import counters
from zoo import diffusion, edges
from zoo.experts import Block, E, given, halves, interleaved, scattered, two_weights
from zoo.heads import Head, Tied
from zoo.layers import Layer

from coda_inductor import reports
from coda_inductor.dynamo import late_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
DEVICE = "cuda"
D, HIDDEN, ROWS, V = 256, 640, 264, 2056


@dataclasses.dataclass(frozen=True)
class Row:
    """One model: ``make`` gives it and its inputs, and perhaps the gradient of its result."""

    make: Callable[[], tuple[Any, ...]]
    fires: tuple[str, ...] = ()  # counters, or patterns that kernels absorb
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    how: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # arguments of ``edges.hold``
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call
    kernels: bool = True  # each site that fuses is one


def layer(rows: int, **how: Any):
    return Layer(**how), (randn(1, rows, D), randn(1, rows, D))


def under_autocast(call):
    def function(*args):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=args[0].dtype != torch.float64):
            return call(*args)

    return function


def head(rows: int, vocabulary: int, bias: bool = False, cap: float = 0.0, z: float = 0.0):
    """The loss, and the logits that it was made of."""

    def ended(logits, labels):
        logits = cap * torch.tanh(logits / cap) if cap else logits
        loss = F.cross_entropy(logits.float().view(-1, vocabulary), labels, ignore_index=-100)
        loss = loss + z * torch.logsumexp(logits.float(), -1).square().mean() if z else loss
        return loss, logits

    labels = torch.randint(vocabulary, (rows,)).index_fill(0, torch.arange(0, rows, 5), -100)
    how = {"width": D, "vocabulary": vocabulary, "between": torch.add, "body_bias": False}
    return Head(ended, torch.float32, bias, **how), (randn(1, rows, D), labels)


def table(tied: bool, words: int):
    """If a place is added twice, or lost, the error is far larger than a rounding."""
    model = Tied(rows=4096, width=D, tied=tied)
    return model, (torch.randint(words, (1, 1024)),)


def confident(confidence: float, cap: float):
    model, *inputs = edges.confident(confidence, d=D, rows=ROWS, vocabulary=V, cap=cap)
    return model, inputs


def normed(kind: str, singular: float, outliers: float = 1.0):
    model, x = edges.Normed(kind, singular, D, HIDDEN), randn(ROWS, D)
    x[:, 5::50] *= outliers
    return model, (x, randn(ROWS, D)), edges.across(model, ROWS, HIDDEN)


def product(x, w, offs):
    """Torch's own, of which there is none in float64."""
    if x.dtype != torch.float64:
        return torch._grouped_mm(x, w, offs=offs)
    ends = [0, *offs.tolist()]
    return torch.cat([x[i:j] @ w[e] for e, (i, j) in enumerate(itertools.pairwise(ends))])


def counted(ids, _perm):
    return torch.histc(ids.int(), bins=E, min=0, max=E - 1)


def experts(tokens: int, skewed: bool, up, sum_, biased_up: bool):
    how = {"up": up, "mm": product, "count": counted, "biased_up": biased_up}
    x, ids, w = (t.detach() for t in given(tokens))
    ids = ids * 0 + torch.tensor([1, 3]) if skewed else ids
    return Block(**how, **({"sum": sum_} if sum_ else {})), (x, ids, w)


def contract(case: Case):
    model, x = model_of(case)
    return model, (x.detach(),)


RAISED = {"fires": ("cross_entropy", "cross_entropy_backward"), "how": {"leading": 1}}
TABLE = {
    **{f"{rows} rows, {dtype}, {'training' if trains else 'inference'}": Row(
        # The gradient of a weight of one row is elementwise since torch 2.13, and reads the norm.
        lambda rows=rows: layer(rows), ("rms_norm",) if rows > 1 or not trains else (),
        {"fp16_norms": dtype == torch.float16},
        {"dtype": dtype, "training": trains},
    ) for rows in (1, 7, 127, 1024, 8191)
      for dtype in (torch.bfloat16, torch.float16) for trains in (False, True)},
    "biases": Row(lambda: layer(304, bias=True), ("rms_norm",)),
    "autocast": Row(
        lambda: layer(512), ("rms_norm",), how={"parameters": torch.float32}, around=under_autocast
    ),
    **{f"head, {rows} rows, {v} words": Row(lambda rows=rows, v=v: head(rows, v), **RAISED)
       for rows in (8, 1000) for v in (4096, 4096 - 40)},
    **{f"head, {how}": Row(lambda how=how: head(120, 4096, **how), **RAISED)
       for how in ({"z": 0.1}, {"bias": True, "cap": 1.5, "z": 0.1})},
    **{f"table, tied {tied}, {words} words": Row(
        lambda tied=tied, words=words: table(tied, words), ("embedding_backward",),
    ) for tied in (True, False) for words in (3, 4096)},
    **{f"confidence {n}, cap {cap}": Row(lambda n=n, cap=cap: confident(n, cap))
       for n in (1, 14) for cap in (0.0, 30.0)},
    "text and image in one stream": Row(
        lambda: (diffusion.Blocks(diffusion.Single, 2, width=D),
                 (randn(1, 300, D), randn(1, 44, D), randn(1, D))),
        ("concatenated",), how={"training": False},
    ),
    **{f"{kind}, singular value {s}": Row(lambda kind=kind, s=s: normed(kind, s), ("rms_norm",))
       for kind, s in edges.SINGULAR},
    "outlier channels": Row(lambda: normed("swiglu", 1, 1000.0), ("rms_norm",)),
    # Of one token's few numbers an error is luck.
    **{f"experts, {tokens} tokens, skewed {skewed}, {up.__name__}, biased {biased}": Row(
        lambda tokens=tokens, skewed=skewed, up=up, sum_=sum_, biased=biased:
        experts(tokens, skewed, up, sum_, biased),
        ("experts",), how={"noise": 1e-4 if tokens > 7 else 2.0**-7},
    ) for tokens, skewed in ((300, False), (300, True), (1, False), (7, False))
      for up, sum_ in ((halves, None), (two_weights, scattered), (interleaved, None))
      for biased in (False, True)},
    # The contract's cases: at their sizes some sites have no kernel, and a gradient is few numbers.
    # Torch has no complex numbers of two bfloat16.
    **{"+".join(names): Row(
        lambda case=CASES[names[0]]: contract(case), options={"strict": False},
        how={"noise": 2.0**-7}, kernels=False,
    ) for names in same_model() if "rotary_complex" not in names},
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_no_worse_than_torch_compile_and_eager(name, monkeypatch):
    """Logits count as large, and are cut in slices of 512 columns."""
    slice_logits(monkeypatch, 2**14)
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 1)
    row = TABLE[name]
    torch.manual_seed(0)
    model, inputs, *tangent = row.make()

    def compile_with(compiler):
        def call(m):
            torch._dynamo.reset()
            counters.clear()
            return row.around(compiler(m))

        return call

    def ours(m):
        return compiled(m, **{"strict": True, **row.options})

    compilers = [compile_with(torch.compile), compile_with(ours)]
    edges.hold(model.to(DEVICE), [x.to(DEVICE) for x in inputs], compilers, *tangent, **row.how)
    fused = [site for report in reports() for site in report.sites if site.fused]
    assert {site.how for site in fused} == {"kernel"} or not row.kernels
    fired = {p for site in fused for p in site.patterns} | set(counters["coda"])
    assert set(row.fires) <= fired


@EXACT
def test_bits_are_eagers_where_accumulators_are_exact(function):
    arguments = small_integers("cuda")
    with torch.no_grad():
        want = function(*arguments)
        have = compiled(function, numerics="eager")(*arguments)
    assert "kernel" in {site.how for site in reports()[-1].sites}
    assert torch.equal(have, want)
