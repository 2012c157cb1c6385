# SPDX-License-Identifier: Apache-2.0
"""What every pass and pattern owes, asked of each: it fires and gradients are eager's in float64,
in inference, of any size, in a checkpoint, under autocast and when it is run twice; it can be
disabled; and a condition that is broken keeps it from firing, for a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import idioms as of
import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, count_as_large, randn, replace_pass
from harness import Harness
from passes import aten_graph, codes, run_pass
from torch import nn
from torch.utils.checkpoint import checkpoint

from coda_inductor import pipeline
from coda_inductor.dynamo.attention import block_masks
from coda_inductor.rewrite import tables
from coda_inductor.semantic.loss import cross_entropy
from coda_inductor.semantic.norms import rms_norm
from coda_inductor.semantic.rotary import rotate_pairs

B, T, D, WIDE, HEADS = 2, 6, 16, 24, 2


def fired(name: str) -> Callable[[Harness], int]:
    return lambda harness: harness.counts[name]


def found(op: Any) -> Callable[[Harness], int]:
    return lambda harness: sum(
        node.target is op
        for module in harness.raised.owning_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )


QUESTIONS = ("training", "inference", "any size", "checkpoint", "autocast", "twice")


@dataclass(frozen=True)
class Case:
    """One pass or pattern.

    Attributes:
        function: of x (B, T, D) and of weights.
        shapes: the weights'.
        seen: how often it did its work.
        run: the pass that does it.
        off: what may be disabled.
        often: in training.
        but: question -> how often there, where that is another number.
        broken: code of a refusal, or any name -> a function of the same arguments where it must
            not fire. Names of codes have a dash.
        options: of the backend.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    seen: Callable[[Harness], int]
    run: str
    off: tuple[str, ...]
    often: int = 1
    but: Mapping[str, int] = field(default_factory=dict)
    broken: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


NORM, GATED, LOSS = ((D, D), (D,), (WIDE, D)), ((2 * WIDE, D),), ((of.V, D),)
ATTENTION, GROUPED = 3 * ((2 * of.HEAD, D),), ((4 * of.HEAD, D), *2 * ((2 * of.HEAD, D),))
ROTARY = ((HEADS * of.HEAD, D),)

CASES = {
    "rms_norm": Case(
        of.rms, NORM, fired("rms_norm"), "norm", ("rms_norm", "idioms", "norm"),
        broken={"norm-read-elsewhere": of.rms_returned, "norm-input-no-gemm": of.rms_of_no_product},
    ),
    "rms_norm_backward": Case(
        of.rms, NORM, fired("rms_norm_backward"), "norm", ("rms_norm_backward", "norm"),
        but={"inference": 0},
    ),
    "layer_norm": Case(
        of.layer, ((D, D), (D,), (D,), (WIDE, D)), fired("layer_norm"), "norm",
        ("layer_norm", "norm"), often=0, but={"inference": 1},
    ),
    "swiglu": Case(
        of.gated(lambda z: z.chunk(2, -1)), GATED, fired("swiglu"), "idioms", ("swiglu", "idioms"),
        broken={"gate-shape": of.gated(lambda z: (z[..., :WIDE], z[:, :1, WIDE:]))},
    ),
    "swiglu_backward": Case(
        lambda x, both, down: F.linear(of.gated(lambda z: z.chunk(2, -1))(x, both), down),
        (*GATED, (D, WIDE)), fired("swiglu_backward"), "idioms", ("swiglu_backward", "swiglu"),
        but={"inference": 0},
    ),
    "packed": Case(
        of.gated(lambda z: z.unflatten(-1, (2, -1)).unbind(-2)), GATED,
        lambda harness: sum(site.program.paired for site in harness.fused), "packed",
        ("packed", "fuse"),
        broken={"in rows": of.gated(lambda z: z.unflatten(1, (2, -1)).unbind(1))},
    ),
    "spelling": Case(
        lambda x, w: torch.ops.aten.cross_entropy_loss.default(
            of.logits(x, w).view(-1, of.V), of.labels(x).flatten()
        ),
        LOSS, found(cross_entropy), "spelling", ("spelling",),
    ),
    "in_place": Case(
        of.in_place, ((D, D), (D,)), found(rms_norm), "in_place", ("in_place",),
        but={"autocast": 0},  # which might widen a root of 16 bits
    ),
    "cross_entropy": Case(
        of.loss, LOSS, fired("cross_entropy"), "idioms", ("cross_entropy", "idioms"),
    ),
    "loss": Case(
        of.loss, LOSS, fired("cross_entropy_backward"), "loss", ("cross_entropy_backward", "loss"),
        but={"inference": 0},
    ),
    "gathered losses": Case(
        of.likelihood, LOSS, found(cross_entropy), "losses", ("losses", "cross_entropy"),
    ),
    "losses": Case(
        lambda x, w: F.cross_entropy(of.logits(x, w).transpose(1, 2), of.labels(x)), LOSS,
        found(cross_entropy), "losses", ("losses",),
    ),
    "late_gradients": Case(
        of.loss_and_logits, LOSS, found("detach"), "late_gradients", ("late_gradients",),
        but={"inference": 0, "checkpoint": 0},  # a region returns them to the graph
    ),
    "embedding": Case(
        of.looked_up, ((of.V, D), (D, D)), fired("embedding_backward"), "embedding",
        ("embedding_backward", "embedding"), but={"inference": 0},
    ),
    "constant_mask": Case(
        of.masked, ATTENTION, fired("constant_mask"), "attention", ("constant_mask", "attention"),
        but={"any size": 0},
    ),
    "grouped_heads": Case(
        of.grouped, GROUPED, fired("grouped_heads"), "attention", ("grouped_heads", "attention"),
        but={"any size": 0},
    ),
    "block_mask": Case(
        of.data_masked, ATTENTION, fired("block_mask"), "block_masks",
        ("block_mask", "block_masks"), but={"any size": 0}, options={"gate": "always"},
    ),
    "rotary": Case(
        of.rotary, ROTARY, fired("rotary"), "heads", ("rotary", "heads"),
    ),
    "tables": Case(
        of.rotary_in_kernels, ROTARY,
        lambda harness: sum(node.target is tables.KEEP for node in harness.graph.nodes),
        "tables", ("tables",), often=2,
    ),
    "rotary_complex": Case(
        of.turned_complex, ROTARY, found(rotate_pairs), "idioms", ("rotary_complex",),
    ),
    "residual": Case(
        of.stream, ((D, D),), fired("residual"), "fuse",
        ("residual", "fuse"), often=2,
        but={"inference": 1, "twice": 4},  # a CPU's programs are plain ops again, which fuse
    ),
    "epilogue": Case(
        lambda x, w: F.gelu(F.linear(x, w)), ((D, D),), fired("epilogue"), "fuse",
        ("epilogue", "fuse"), but={"autocast": 3, "twice": 2},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    count_as_large(monkeypatch)
    monkeypatch.setattr(block_masks, "DEVICE", "cpu")
    monkeypatch.setattr(block_masks, "DTYPES", (torch.float64, torch.float32, torch.bfloat16))


def model(case: Case, function: Any = None) -> tuple[Weights, torch.Tensor]:
    weights = [randn(*s) / (s[-1] ** 0.5 if len(s) > 1 else 1) for s in case.shapes]
    return Weights(function or case.function, *weights), randn(B, T, D).requires_grad_()


class Region(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Cast(Region):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", CASES)
def test_as_often_as_it_should_with_eagers_gradients(name, question, monkeypatch):
    case, run, how = CASES[name], check_gradients, {}
    function, x = model(case)
    if question == "inference":
        run = check
    elif question == "any size":
        how["dynamic"] = True
    elif question == "checkpoint":
        function = Region(function)
    elif question == "autocast":
        function, x = Cast(function.float()), x.detach().float().requires_grad_()
        how["tolerance"] = 5e-2
    elif question == "twice":
        replace_pass(monkeypatch, case.run, lambda run: lambda *a: (run(*a), run(*a)))
    harness = run(function, x, **how, **case.options)
    assert case.seen(harness) == case.but.get(question, case.often)


@pytest.mark.parametrize(("name", "off"), [(n, off) for n in CASES for off in CASES[n].off])
def test_disabled(name, off):
    """In training, if it does anything there."""
    case = CASES[name]
    run = check_gradients if case.often else check
    assert case.seen(run(*model(case), disable=[off], **case.options)) == 0


@pytest.mark.parametrize(("name", "why"), [(n, why) for n in CASES for why in CASES[n].broken])
def test_a_condition_that_is_broken(name, why):
    case = CASES[name]
    harness = check_gradients(*model(case, case.broken[why]), **case.options)
    assert case.seen(harness) == 0
    assert "-" not in why or why in codes(harness)


@pytest.mark.parametrize("name", [each.name for each in pipeline.ON_ATEN if each.name != "fuse"])
def test_a_graph_without_anything_for_it_stays(name):
    graph = aten_graph(lambda x, w: (x @ w).relu().sum(), randn(3, 4), randn(4, 5))
    before = [node.target for node in graph.nodes]
    for each in pipeline.ON_ATEN:
        if each.name == name:
            record = run_pass(each.run, graph)
            assert not record.fired
            assert not record.report.refusals
    assert [node.target for node in graph.nodes] == before
