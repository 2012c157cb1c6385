# SPDX-License-Identifier: Apache-2.0
"""What every pass and pattern owes, asked of each: it fires and gradients are eager's in float64,
of any size, in a checkpoint, under autocast and when it is run twice; it can be disabled; and a
condition that is broken keeps it from firing, for a reason. ``CASES`` are asked on a GPU too
(``gpu/test_gpu_exact.py``), also in inference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checking import Weights, check, check_gradients, count_as_large, randn, replace_pass
from harness import Harness
from passes import aten_graph, codes, run_pass
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import experts as mixture
from zoo import idioms as of

from coda_inductor import pipeline
from coda_inductor.dynamo.attention import block_masks
from coda_inductor.patterns import builtin_folder
from coda_inductor.rewrite import tables
from coda_inductor.semantic.columns import COLUMNS
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


def twice_normalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x + F.linear(F.layer_norm(x, (D,)), w)
    return F.linear(F.layer_norm(x, (D,)), w)


def mlp(x: torch.Tensor, both: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(of.gated(lambda z: z.chunk(2, -1))(x, both), down)


def sliced(*slices: Any, of: Any = F.linear) -> Callable[..., Any]:
    def function(x, w):
        z = of(x, w)
        return sum(z[..., slice(*each)].sin().sum(-1) for each in slices)

    return function


def packed(cut: Callable[..., Any], **linear: Any) -> Callable[..., Any]:
    """Of one product, queries and keys that are rotated, and values."""

    def function(x, w):
        parts = cut(F.linear(x, w, **linear))
        q, k, v = (t.unflatten(-1, (-1, of.HEAD)).transpose(1, 2) for t in parts[:3])
        return of.rotated(q, x).sum(1) * of.rotated(k, x).sum(1) + v.sin().sum(1), *parts[3:]

    return function


def apart(harness: Harness) -> int:
    """The products of columns of a weight."""
    aten = torch.ops.aten
    products = harness.graph.find_nodes(op="call_function", target=aten.mm.default)
    return sum(node.args[1].target is aten.slice.Tensor for node in products)


def clamped_mlp(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return F.linear(of.clamped(x, *weights[:2]), weights[2])


def copied(harness: Harness) -> bool:
    """Is the stream copied, so that its sums, of which there are some, lie row by row?"""
    adds = harness.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    sums = [n.meta["val"] for n in adds if n.meta["val"].dim() == 3]
    return bool(sums) and all(each.is_contiguous() for each in sums)


def recomputed(harness: Harness) -> bool:
    """Does the forward pass leave one matrix of this width, and not its activation too?"""
    left = [node.meta["val"] for node in harness.saved if node.op != "placeholder"]
    shapes = [t.shape for t in left if isinstance(t, torch.Tensor) and t.dim() > 1]
    return len([s for s in shapes if s[-1] == WIDE and s[0] != D]) == 1  # D: a cast weight


@dataclass(frozen=True)
class Case:
    """One pass or pattern: ``function`` of x (B, T, D) and of weights, and what may be disabled."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]  # the weights'
    seen: Callable[[Harness], int]  # how often it did its work
    run: str  # the pass that does it
    off: tuple[str, ...]
    often: int = 1  # in training; 0: it fires in inference, once
    #: Question -> how often there, where that is another number.
    but: Mapping[str, int] = field(default_factory=dict)
    #: Code of a refusal (with a dash), or any name -> a function of the same arguments where it
    #: must not fire.
    broken: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


NORM, GATED, LOSS = ((D, D), (D,), (WIDE, D)), ((2 * WIDE, D),), ((of.V, D),)
ATTENTION, GROUPED = 3 * ((2 * of.HEAD, D),), ((4 * of.HEAD, D), *2 * ((2 * of.HEAD, D),))
EXPERTS = (mixture.E, 2 * WIDE, D), (mixture.E, D, WIDE), (mixture.E, D)
ROTARY, CLAMPED = ((HEADS * of.HEAD, D),), (*2 * ((WIDE, D),), (D, WIDE))

CASES = {
    "rms_norm": Case(
        of.rms, NORM, fired("rms_norm"), "norm", ("rms_norm", "idioms", "norm"),
        broken={
            "norm-input-dtype": lambda x, w, gamma, a: F.linear(
                of.rms_by_hand(torch.complex(of.stream(x, w), x), gamma).real, a
            ),
            "norm-result-shape": lambda x, w, gamma, a: F.linear(
                of.rms_by_hand(of.stream(x, w), gamma.expand(3, 1, 1, -1)), a
            ),
        },
    ),
    "rms_norm_backward": Case(
        of.rms, NORM, fired("rms_norm_backward"), "norm", ("rms_norm_backward", "norm"),
    ),
    "swiglu": Case(
        mlp, (*GATED, (D, WIDE)), fired("swiglu"), "idioms", ("swiglu", "idioms"),
        broken={"gate-shape": lambda x, both, down: (
            of.gated(lambda z: (z[..., :WIDE], z[:, :1, WIDE:]))(x, both) @ down.T
        )},
    ),
    "swiglu_backward": Case(
        mlp, (*GATED, (D, WIDE)), fired("swiglu_backward"), "idioms", ("swiglu_backward",),
    ),
    "packed": Case(
        of.gated(lambda z: z.unflatten(-1, (2, -1)).unbind(-2)), GATED,
        lambda harness: sum(site.program.paired for site in harness.fused), "packed",
        ("packed", "fuse"),
        broken={"in rows": of.gated(lambda z: z.unflatten(1, (2, -1)).unbind(1))},
    ),
    "in_place": Case(
        of.in_place, ((D, D), (D,)), found(rms_norm), "in_place", ("in_place",),
        but={"autocast": 0},  # which might widen a root of 16 bits
    ),
    "cross_entropy": Case(of.loss, LOSS, fired("cross_entropy"), "idioms", ("cross_entropy",)),
    "loss": Case(
        of.loss, LOSS, fired("cross_entropy_backward"), "loss", ("cross_entropy_backward", "loss"),
    ),
    "entropy": Case(
        lambda x, w: -(
            (z := of.logits(x, w)).softmax(-1) * z.log_softmax(-1)
        ).sum(-1), LOSS, fired("entropy"), "idioms", ("entropy", "idioms"),
    ),
    "kept_rows": Case(
        lambda x, w: -(
            (z := of.logits(x, w)[:, -2:]).softmax(-1) * z.log_softmax(-1)
        ).sum(-1),
        LOSS, fired("entropy"), "kept_rows", ("kept_rows", "entropy"), but={"autocast": 0},
        broken={
            "a column less": lambda x, w: -(
                (z := of.logits(x, w)[..., :-1]).softmax(-1) * z.log_softmax(-1)
            ).sum(-1),
            "read elsewhere": lambda x, w: (
                -((z := (y := of.logits(x, w))[:, 1:]).softmax(-1) * z.log_softmax(-1)).sum(-1), y
            ),
            "a column less, then rows": lambda x, w: -(
                (z := of.logits(x, w)[..., :-1][:, 1:]).softmax(-1) * z.log_softmax(-1)
            ).sum(-1),
            "read between two slices": lambda x, w: (
                -((z := (y := of.logits(x, w)[:, 1:])[:, :2]).softmax(-1)
                  * z.log_softmax(-1)).sum(-1), y
            ),
        },
    ),
    "loops": Case(
        lambda x, w: torch.stack(
            [-(z.softmax(-1) * z.log_softmax(-1)).sum(-1) for z in of.logits(x, w)]
        ), LOSS, fired("entropy"), "loops", ("loops", "entropy"),
        broken={
            "another order": lambda x, w: torch.stack(
                [-(z.softmax(-1) * z.log_softmax(-1)).sum(-1) for z in [*of.logits(x, w)][::-1]]
            ),
        },
    ),
    "unstored": Case(
        lambda *given: of.loss(*given) + 0, LOSS,
        lambda harness: sum(not site.program.stores for site in harness.fused),
        "unstored", ("unstored", "cross_entropy"), often=0,
    ),
    "gathered losses": Case(
        lambda x, w: (
            F.log_softmax(of.logits(x, w), -1).gather(-1, of.labels(x)[..., None]).mean()
        ),
        LOSS, found(cross_entropy), "losses", ("losses", "cross_entropy"),
    ),
    "losses": Case(
        lambda x, w: F.cross_entropy(of.logits(x, w).transpose(1, 2), of.labels(x)), LOSS,
        found(cross_entropy), "losses", ("losses",),
    ),
    "late_gradients": Case(
        lambda x, w: (
            F.cross_entropy((z := of.logits(x, w)).view(-1, of.V), of.labels(x).flatten()), z
        ),
        LOSS, found("detach"), "late_gradients", ("late_gradients",),
        but={"checkpoint": 0},  # a region returns them to the graph
    ),
    "embedding": Case(
        lambda x, table, w: F.linear(F.embedding(of.labels(x) % 7, table) @ w + x, table),
        ((of.V, D), (D, D)), fired("embedding_backward"), "embedding",
        ("embedding_backward", "embedding"),
    ),
    "constant_mask": Case(
        of.masked, ATTENTION, fired("constant_mask"), "attention", ("constant_mask", "attention"),
    ),
    "grouped_heads": Case(
        of.grouped, GROUPED, fired("grouped_heads"), "attention", ("grouped_heads", "attention"),
    ),
    "block_mask": Case(
        of.data_masked, ATTENTION, fired("block_mask"), "block_masks",
        ("block_mask", "block_masks"), options={"gate": "always"},
    ),
    "rotary": Case(of.rotary, ROTARY, fired("rotary"), "heads", ("rotary", "heads")),
    "tables": Case(
        lambda x, w: of.rotated(of.heads(x, w)[0].cumsum(2), x), ROTARY,
        lambda harness: sum(node.target is tables.KEEP for node in harness.graph.nodes),
        "tables", ("tables",), often=2,
    ),
    "rotary_complex": Case(
        of.turned_complex, ROTARY, found(rotate_pairs), "idioms", ("rotary_complex",)
    ),
    "clamped_swiglu": Case(
        clamped_mlp, CLAMPED, fired("clamped_swiglu"), "idioms", ("clamped_swiglu", "idioms"),
        broken={"other clamps": lambda x, gate, up, down: (
            of.clamped_otherwise(x, gate, up) @ down.T
        )},
    ),
    "clamped_swiglu_backward": Case(
        clamped_mlp, CLAMPED, fired("clamped_swiglu_backward"), "idioms",
        ("clamped_swiglu_backward",),
    ),
    "experts": Case(of.experts, EXPERTS, fired("experts"), "experts", ("experts",)),
    "experts_backward": Case(
        of.experts, EXPERTS, fired("experts_backward"), "fuse",
        ("experts_backward", "fuse"),
    ),
    "columns": Case(
        sliced((None, 9), (9, 20), (-4, None), (WIDE, None)), ((WIDE, D),),
        lambda harness: sum(node.target is COLUMNS for node in harness.graph.nodes), "columns",
        ("columns",),
        broken={"others": lambda x, w: x.sum(-1) + sum(no(x.detach(), w * i) for i, no in {
            1: sliced((None, 9), (12, WIDE)), 2: sliced((0, 6, 2), (3, None)),  # a gap, a step
            3: sliced((None, 9), (5, WIDE)), 4: sliced((0, 9), (0, WIDE)),  # an overlap, a whole
            5: sliced((None, 9), (9, None), of=lambda x, w: F.linear(x, w).cos()),  # no product
            6: lambda x, w: F.linear(  # no zeros around
                x.slice_scatter(x[:, :, 8:], -1, 0, 8) + x.slice_scatter(x[:, :, 8:], -1, 8), w
            )[..., 0],
            7: lambda x, w: F.linear(  # another dtype than the part's
                torch.zeros_like(x).slice_scatter(x[..., :0], -1, 0, 0) + x.float(), w)[..., 0],
        }.items())},
    ),
    "parts": Case(
        packed(lambda z: z.split([2 * of.HEAD, of.HEAD, of.HEAD], -1)), ((4 * of.HEAD, D),),
        apart, "parts", ("parts",), often=2,
        broken={
            "memory-seen": packed(lambda z: (z[..., :32], z[..., 32:48], *2 * (z[..., 48:],))),
            "others": lambda x, w: sum(packed(no)(x, w * i)[0] for i, no in {
                1: lambda z: (z[..., :32], z[..., 16:48], z[..., 48:]),  # an overlap
                2: lambda z: (z[..., :48], z[..., 48:], x),  # all columns are rotated
                3: lambda z: (z[..., :32:2], z[..., 32:48], z[..., 48:]),  # a step
                4: lambda z: (z[..., :32], z[..., 32:48], z[:, -1:, 48:]),  # one row
                5: lambda z: z.unflatten(-1, (-1, 4)).mT.flatten(-2).split(16, -1),  # a copy
                6: lambda z: (z[..., :32], z[..., 32:48], z[..., 48:] + z[..., -1:]),  # one more
                7: lambda z: (*z[..., :48].split(32, -1), z.as_strided((2, 6, 16), (0, 0, 1), 48)),
            }.items()),
            "bias": lambda x, w: packed(lambda z: z.split([32, 16, 16], -1), bias=w[:, 0])(x, w)[0],
        },
    ),
    "concatenated": Case(
        of.joined, ((WIDE, D), (D, D + WIDE)), fired("concatenated"), "concatenated",
        ("concatenated",), often=0, but={"autocast": 0},  # a weight's gradient reads all of it
        broken={
            "no-gain": lambda x, up, down: of.joined(x, up, down.repeat(5, 1)),
            "bias-form": lambda x, up, down: torch.addmm(
                x[0, 0], torch.cat([x, F.linear(x, up)], -1)[0], down.T, alpha=2
            ).relu(),
        },
    ),
    "noops": Case(
        lambda x, w: F.linear(x.clone()[:, 0:], w), ((D, D),),
        lambda harness: not any("clone" in op for op in harness.ops()), "noops", ("noops",),
    ),
    "rows": Case(
        lambda x, w: twice_normalized(x.mT.contiguous().mT, w), ((D, D),), copied, "rows",
        ("rows",),
        broken={
            "memory-seen": lambda x, w: (
                twice_normalized(y := x.mT.contiguous().mT, w), y + 1
            )
        },
    ),
    "recompute": Case(
        lambda x, up, down: F.linear(F.gelu(F.linear(x, up)), down),
        ((WIDE, D), (D, WIDE)), recomputed, "recompute", ("recompute",),
        but={"checkpoint": 0},
    ),
    "residual": Case(
        of.stream, ((D, D),), fired("residual"), "fuse",
        ("residual", "fuse"), often=2,
        but={"twice": 4},  # a CPU's programs are plain ops again, which fuse
    ),
    "epilogue": Case(
        lambda x, w: F.gelu(F.linear(x, w)), ((D, D),), fired("epilogue"), "fuse",
        ("epilogue", "fuse"), but={"autocast": 3, "twice": 2},
    ),
}  # fmt: skip


#: What a case cannot ask: FP8 has no gradient in float64, a collective has several ranks, adapters
#: are of low rank and draw their own masks, a border lies between checkpoints, grouped products are
#: left where these fail, and logits in float64 are not rounded.
NO_CASE = {
    *("fp8", "fp8_casts", "fp8_rest", "fp8_quantize", "fp8_product", "frozen_fp8", "fp8_linear"),
    *("collectives", "collective", "adapters", "borders", "dropouts", "adapter_dropout"),
    *("experts_rest", "rounded_logits"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    count_all_as_large(monkeypatch)


def count_all_as_large(monkeypatch):
    count_as_large(monkeypatch)
    monkeypatch.setattr(block_masks, "DEVICE", "cpu")
    monkeypatch.setattr(block_masks, "DTYPES", (torch.float64, torch.float32, torch.bfloat16))


def model(case: Case, function: Any = None) -> tuple[Weights, torch.Tensor]:
    weights = [randn(*s) / (s[-1] ** 0.5 if len(s) > 1 else 1) for s in case.shapes]
    return Weights(function or case.function, *weights), randn(B, T, D).requires_grad_()


class Region(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Cast(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def same_model() -> list[tuple[str, ...]]:
    """Names of cases that are about one model: each is compiled once for all of them."""
    found: dict[Any, list[str]] = {}
    for name, case in CASES.items():
        found.setdefault((case.function, case.shapes), []).append(name)
    return [tuple(names) for names in found.values()]


def questions(names: tuple[str, ...]) -> tuple[str, ...]:
    """A checkpoint of any size is one, unless a case does nothing in either. "twice" is where sizes
    are known and nothing is around the function."""
    apart = ("any size", "checkpoint")
    differ = any(question in CASES[name].but for name in names for question in apart)
    return (*(apart if differ else [" ".join(apart)]), "autocast", "twice")


@pytest.mark.parametrize(("names", "question"), [
    (names, question) for names in same_model() for question in questions(names)
])  # fmt: skip
def test_as_often_as_it_should_with_eagers_gradients(names, question, monkeypatch):
    """In training, if it does anything there."""
    cases, how = [CASES[name] for name in names], {}
    function, x = model(cases[0])
    if "any size" in question:
        how["dynamic"] = True
    if "checkpoint" in question:
        function = Region(function)
    if question == "autocast":
        function, x = Cast(function.float()), x.detach().float().requires_grad_()
        how["tolerance"] = 5e-2
    if question == "twice":
        for each in {case.run for case in cases}:
            replace_pass(monkeypatch, each, lambda run: lambda *a: (run(*a), run(*a)))
    run = check_gradients if cases[0].often else check
    harness = run(function, x, **how, **cases[0].options)
    seen = [case.seen(harness) for case in cases]
    assert seen == [case.but.get(question, case.often or 1) for case in cases], names


#: Each name that can be disabled, and the first model of a case that says so.
OFF = {off: names for names in reversed(same_model()) for name in names for off in CASES[name].off}


@pytest.mark.parametrize(("off", "names"), OFF.items(), ids=OFF)
def test_disabled(off, names):
    case, harness = CASES[names[0]], Harness(disable=[off], **CASES[names[0]].options)
    (harness.train if case.often else harness.run)(*model(case))
    assert not any(CASES[name].seen(harness) for name in names if off in CASES[name].off)
    assert harness.record.stopped == {off}  # else it would be said to have no effect


@pytest.mark.parametrize(("name", "why"), [(n, why) for n in CASES for why in CASES[n].broken])
def test_a_condition_that_is_broken(name, why):
    case = CASES[name]
    run = check_gradients if case.often else check
    harness = run(*model(case, case.broken[why]), **case.options)
    assert case.seen(harness) == 0
    assert "-" not in why or why in codes(harness)


def test_every_pass_pattern_and_counter_has_a_case():
    """But for passes that are needed, so that each case runs them."""
    passes = [p for p in (*pipeline.ON_DYNAMO, *pipeline.ON_ATEN) if not p.needed]
    owing = {name for each in passes for name in (each.name, *each.counts)}
    owing |= {path.stem for path in builtin_folder().glob("*.py")}
    cases = {name for case in CASES.values() for name in (case.run, *case.off)}
    assert owing - cases == NO_CASE


def test_a_graph_without_anything_for_them_stays():
    graph = aten_graph(lambda x, w: (x @ w).relu().sum(), randn(3, 4), randn(4, 5))
    before = [node.target for node in graph.nodes]
    for each in pipeline.ON_ATEN:
        if each.name != "fuse":
            record = run_pass(each.run, graph)
            assert not record.fired, each.name
            assert not record.report.refusals, each.name
            assert [node.target for node in graph.nodes] == before, each.name
