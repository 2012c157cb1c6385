# SPDX-License-Identifier: Apache-2.0
"""R1 to R4 of docs/architecture.md, each about the function that applies it: a graph before and
after the pass gives equal fractions, element by element, in outputs and gradients.

``test_no_step_can_be_left_out`` shows that such a proof fails where the pass is wrong.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from checking import swiglu
from rationals import after, joint, results

from coda_inductor.graph.edit import Put
from coda_inductor.graph.nodes import aten, fake
from coda_inductor.options import parse
from coda_inductor.plan import Plan
from coda_inductor.record import Record
from coda_inductor.rewrite.norm.defer import defer_norms
from coda_inductor.semantic import rms_norm
from coda_inductor.semantic.define import DEFINITIONS
from coda_inductor.sites import Sites

M, D, K, N = 3, 4, 5, 6  # -1 / D is exact
EPS = 2.0**-10


def rms_and_gate(x0, y, wo, gamma, wg, wu, wd):
    """A GEMM makes the gradient of what reads the norm."""
    x = x0 + y @ wo
    n = rms_norm(x, gamma, EPS, x.dtype)[0]
    return x + swiglu(n @ wg, n @ wu) @ wd


def rms_and_caller(x0, y, wo, gamma, wq, wk, c):
    """The caller makes the gradients, one projection has a bias."""
    x = x0 + y @ wo
    n = rms_norm(x, gamma, EPS, x.dtype)[0]
    return x, n @ wq, torch.addmm(c, n, wk)


def bare_rms(x0, y, wo, wg, wd):
    x = x0 + y @ wo
    return F.silu(rms_norm(x, None, EPS, x.dtype)[0] @ wg) @ wd


STREAM = ((M, D), (M, K), (K, D), (D,))
SUBJECTS = {
    "rms_and_gate": (rms_and_gate, *STREAM, (D, N), (D, N), (N, D)),
    "rms_and_caller": (rms_and_caller, *STREAM, (D, N), (D, N), (N,)),
    "bare_rms": (bare_rms, *STREAM[:3], (D, N), (N, D)),
}


@functools.cache
def subject(name):
    """(its joint graph, what that gives at each point)."""
    graph = joint(*SUBJECTS[name])
    return graph, everywhere(graph)


def everywhere(graph):
    return [results(graph, point=point) for point in range(3)]


def by(function):
    """A pass as one of a graph alone: everything legal is done."""

    def run(graph):
        record = Record(parse(None, {"strict": True}), dry=True)
        record.sites = Sites(Plan(record.options, dry=True))
        function(graph, record)

    return run


defer = by(defer_norms)


def norms(graph):
    return [n for n in graph.nodes if n.target in DEFINITIONS and "norm" in n.target.__name__]


@pytest.mark.parametrize("name", SUBJECTS)
def test_norms_that_wait_are_the_same_numbers(name):
    """R1, R3 and R4 for RMSNorm."""
    graph, want = subject(name)
    rewritten = after(graph, defer)
    assert len(norms(graph)) == 2
    assert len(norms(rewritten)) == 0
    assert everywhere(rewritten) == want


def mutate(monkeypatch, number):
    """Let the pass leave out the ``number``-th sum, difference or product that it inserts; returns
    a list of one entry if there was one."""
    left_out, plain, seen = [], Put.__call__, iter(range(10**6))

    def call(put, target, *args):
        node = plain(put, target, *args)
        if target in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor):
            shape = fake(node).shape
            same = [a for a in args if hasattr(a, "meta") and fake(a).shape == shape]
            if same and next(seen) == number:
                left_out.append(node)
                return same[0]
        return node

    monkeypatch.setattr(Put, "__call__", call)
    return left_out


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_step_can_be_left_out(name, monkeypatch):
    """The proof fails wherever one step of the rewrite is dropped."""
    graph, want = subject(name)
    for number in range(200):
        with monkeypatch.context() as patch:
            left_out = mutate(patch, number)
            wrong = after(graph, defer)
        if not left_out:
            break
        differs = any(results(wrong, point=p) != w for p, w in enumerate(want))
        assert differs, f"without {left_out[0].format_node()}"
    assert number > 5
