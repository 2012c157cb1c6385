# SPDX-License-Identifier: Apache-2.0
"""A graph of ours that does not compile costs the passes that wrote it, and no others."""

import copy
from dataclasses import replace

import pytest
import torch
from checking import differentiate, replace_pass
from harness import as_it_is
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx as inductor
from torch._inductor import config, lowering
from torch._inductor.exc import InductorError, LoweringException
from torch.utils.checkpoint import checkpoint
from zoo.layers import D, Gated, whole

import coda_inductor
from coda_inductor import FallbackError, falls, op_by_op, pass_mode, pipeline

TEXT = "Assertion: no such kernel\nFound from:\n  out = torch.nn.functional.linear(x, w)"


@torch.library.custom_op("coda_tests::refused", mutates_args=())
def refused(x: torch.Tensor) -> torch.Tensor:
    """An op that Inductor cannot compile."""
    return x.clone()


@refused.register_fake
def _(x):
    return torch.empty_like(x)


refused.register_autograd(lambda _, gradient: refused(gradient))
REFUSED = torch.ops.coda_tests.refused.default


def refuse(graph):
    """Insert it before the first op of ``graph``, or its call in a checkpointed region."""
    insert(graph, REFUSED, lambda x: x)


def wrong_shape(graph):
    """As a pass that confuses rows and columns."""
    insert(graph, torch.ops.aten.t.default, lambda x: x.t())


def wrong_dtype(graph):
    insert(graph, torch.ops.prims.convert_element_type.default, lambda x: x.half(), torch.half)


def insert(graph, op, of, *others):
    key = next(k for k in ("example_value", "val") for n in graph.nodes if k in n.meta)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    reads = {n: [x for x in n.all_input_nodes if is_matrix(x.meta.get(key))] for n in calls}
    node = next(n for n in calls if reads[n])
    with graph.inserting_before(node):
        new = graph.call_function(op, (reads[node][0], *others))
    new.meta = {**node.meta, key: of(reads[node][0].meta[key])}
    node.replace_input_with(reads[node][0], new)


def is_matrix(value):
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point()


@pytest.fixture(autouse=True)
def inner(monkeypatch, warned):
    """Inductor without code, which refuses graphs with that op; ``inner.asked`` says what it
    compiled."""

    def compile_fx_inner(gm, inputs, **how):
        asked = "backward" if how.get("is_backward") else "forward"
        if stubborn(gm, asked):
            compile_fx_inner.asked.append(f"{asked} refused")
            gm.graph.erase_node(gm.graph.output_node())  # its passes have been at work
            raise InductorError(LoweringException(RuntimeError(TEXT), "op", [], {}), None)
        compile_fx_inner.asked.append(asked)
        return as_it_is(gm, inputs, **how)

    def stubborn(gm, asked):
        return compile_fx_inner.never or any(n.target is REFUSED for n in gm.graph.nodes)

    compile_fx_inner.asked, compile_fx_inner.never = [], False
    monkeypatch.setattr(op_by_op, "compile_fx_inner", compile_fx_inner)
    monkeypatch.setattr(falls, "_left_out", {})
    coda_inductor.report.forget()
    return compile_fx_inner


@pytest.fixture
def break_pass(monkeypatch):
    """Let a pass write something bad after its own work."""

    def breaks(name, write=refuse):
        for place in ("ON_DYNAMO", "ON_ATEN"):
            passes = tuple(
                broken(each, write) if each.name == name else each
                for each in getattr(pipeline, place)
            )
            monkeypatch.setattr(pipeline, place, passes)

    return breaks


def broken(each, write):
    def run(graph, record):
        if each.when(graph, record):
            each.run(graph, record)
        write(graph)

    return replace(each, run=run, when=lambda *_: True)


def coda(function, **how):
    return torch.compile(function, backend="coda", **how)


def compare(compiler=coda, grad=True, rows=(3,), **how):
    """Results and gradients are eager's, for each number of rows."""
    model = whole().double()
    mine = copy.deepcopy(model)
    own = compiler(mine, **how)
    for n in rows:
        x = torch.randn(n, D, dtype=torch.float64, requires_grad=grad)
        y = x.detach().clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            want, found = model(x), own(y)
        torch.testing.assert_close(found, want)
        if grad:
            ours, eagers = (found, (mine, (y,))), (want, (model, (x,)))
            torch.testing.assert_close(differentiate(*ours), differentiate(*eagers))


def left_out(warned):
    """The passes that warnings name."""
    said = [text for text in warned() if "what it wrote does not compile" in text]
    assert all("one op at a time" not in text for text in warned())
    return [text.split("the pass ")[1].split()[0] for text in said]


#: Of each list the first pass, one in the middle and the last that may be left out.
ENDS = ("assertions", "idioms", "late_gradients", "noops", "norm", "fuse", "fp8_rest")


@pytest.mark.parametrize("name", ENDS)
def test_one_pass_is_out_and_named(name, break_pass, inner, warned):
    """The others have done their work, and Inductor has compiled it."""
    break_pass(name)
    compare(grad=name in ("norm", "fuse"))
    assert left_out(warned) == [name]
    assert any(TEXT in text for text in warned()), "all of it"
    assert not inner.asked[-1].endswith("refused")
    fused = 4 if name == "norm" else 2
    (report,) = coda_inductor.reports()
    assert [r.where for r in report.refusals if r.what == "pass"] == [name]
    assert sum(site.fused for site in report.sites) == (0 if name == "fuse" else fused)


def test_all_is_well(inner, warned):
    """Then there is one attempt, and torch compiles the backward graph when it is called: only then
    it knows whether the graph is retained."""
    own = coda(whole().double())
    loss = own(torch.randn(3, D, dtype=torch.float64)).sum()
    assert inner.asked == ["forward"]
    loss.backward(retain_graph=True)
    loss.backward()
    assert inner.asked == ["forward", "backward"]
    assert not warned()


@pytest.mark.parametrize(("name", "write"), [("assertions", wrong_shape), ("idioms", wrong_dtype)])
def test_wrong_shapes_and_dtypes(name, write, break_pass, warned):
    """AOTAutograd finds them before Inductor sees anything."""
    break_pass(name, write)
    compare()
    assert left_out(warned) == [name]


@pytest.mark.parametrize(("names", "write"), [
    (("idioms", "heads"), wrong_shape), (("norm", "fuse"), refuse),
])  # fmt: skip
def test_two_bad_passes(names, write, break_pass, warned):
    break_pass(names[0], write)
    break_pass(names[1])
    compare(grad=False)
    assert sorted(left_out(warned)) == sorted(names)


def test_only_the_backward_graph(monkeypatch, inner, warned):
    """It is compiled when its forward graph cannot change any more, and runs op by op."""

    def backward(graph, record):
        if record.enabled("fuse"):
            fuse(graph, record)
            tangent = next(n for n in graph.nodes if "tangents" in str(n.target))
            with graph.inserting_after(tangent):
                new = graph.call_function(REFUSED, (tangent,))
            new.meta = dict(tangent.meta)
            tangent.replace_all_uses_with(new, lambda user: user is not new)

    fuse = next(each.run for each in pipeline.ON_ATEN if each.name == "fuse")
    replace_pass(monkeypatch, "fuse", lambda _: backward)
    compare()
    assert inner.asked == ["forward", "backward refused"]
    (text,) = warned()
    assert "backward pass, falls back to one op at a time" in text


@pytest.mark.parametrize("grad", [False, True])
def test_dynamic_shapes_and_the_next_compilation(grad, break_pass, inner, warned):
    """The result holds for other sizes, which torch compiles again: no second search."""
    break_pass("norm")
    compare(rows=(3, 5), grad=grad, dynamic=None)
    first = inner.asked.count("forward refused")
    compare(rows=(7, 4), grad=grad, dynamic=True)
    assert left_out(warned) == ["norm"]
    torch._dynamo.reset()
    before = len(inner.asked)
    compare(grad=grad)
    assert inner.asked[before:] == (["forward", "backward"] if grad else ["forward"])
    assert first
    (report,) = coda_inductor.reports()[-1:]
    assert [r.where for r in report.refusals if r.what == "pass"] == ["norm"]


def test_checkpointed_regions_are_put_back(break_pass, warned):
    def regions(model):
        return coda(lambda x: checkpoint(model, x, use_reentrant=False))

    break_pass("idioms", wrong_shape)
    compare(regions)
    assert left_out(warned) == ["idioms"]


@pytest.mark.parametrize("name", ["plan", "refresh_views"])
def test_what_every_graph_needs_costs_all_passes(name, break_pass, inner, warned):
    """Then the graph is the user's own, and compiled."""
    break_pass(name)
    compare()
    (said,) = warned()
    assert "falls back to Inductor: with our passes it does not compile" in said
    assert TEXT in said
    assert inner.asked == ["forward refused", "forward refused", "forward", "backward"]
    assert not coda_inductor.reports()
    assert not counters["coda"]


def test_where_inductor_cannot_compile_the_users_graph(break_pass, inner, warned):
    """It runs op by op, and no pass is accused."""
    inner.never = True
    compare()
    assert all("falls back to one op at a time" in text and TEXT in text for text in warned())
    assert len(warned()) == 2
    assert inner.asked.count("forward refused") == 3


def test_merged_collectives_stay_because_other_ranks_have_them(break_pass, inner, warned):
    break_pass("collectives")
    compare()
    assert inner.asked == ["forward refused", "backward"]
    (said,) = warned()
    assert "forward pass, falls back to one op at a time" in said
    assert TEXT in said
    torch._dynamo.reset()
    with pass_mode.enabled(), pytest.raises(InductorError, match="no such kernel"):
        compare(enabled)


def test_strict(break_pass, inner):
    break_pass("norm")
    with pytest.raises(FallbackError, match="no such kernel"):
        compare(options={"strict": True})
    assert inner.asked == ["forward refused"]


def test_a_lack_of_memory_is_not_remembered(monkeypatch, inner, warned):
    """Nor is it the fault of a pass that any graph needs memory to compile."""

    def full(graph, _record):
        raise_in.append(graph)

    raise_in = []
    monkeypatch.setattr(falls, "_left_out", known := {})
    replace_pass(monkeypatch, "norm", lambda run: lambda g, r: (run(g, r), full(g, r)))

    def compile_fx_inner(gm, inputs, **how):
        if raise_in:
            raise_in.clear()
            raise InductorError(torch.OutOfMemoryError("no room"), None)
        return as_it_is(gm, inputs, **how)

    monkeypatch.setattr(op_by_op, "compile_fx_inner", compile_fx_inner)
    compare()
    assert left_out(warned) == ["norm"]
    assert not known


def test_another_model_with_the_same_ops_keeps_its_passes(break_pass, inner, warned):
    break_pass("fuse")
    compare()
    assert left_out(warned) == ["fuse"]
    asked = len(inner.asked)
    model = Gated(2 * D, 16, norm=nn.RMSNorm, front=True, down=False, residual=False).double()
    x = torch.randn(3, 2 * D, dtype=torch.float64)
    coda(model)(x).sum().backward()
    assert inner.asked[asked] == "forward refused"


def enabled(model, **how):
    """As torch.compile(model) calls it, with that Inductor."""

    def backend(gm, inputs):
        return inductor.compile_fx(gm, inputs, inner_compile=op_by_op.compile_fx_inner)

    return torch.compile(model, backend=backend, **how)


@pytest.mark.parametrize(
    ("name", "write"), [("losses", refuse), ("idioms", wrong_shape), ("fuse", refuse)]
)
def test_under_inductors_own_name(name, write, break_pass, inner, warned):
    break_pass(name, write)
    with pass_mode.enabled():
        compare(enabled)
        assert left_out(warned) == [name]
        before = len(inner.asked)
        torch._dynamo.reset()
        compare(enabled, rows=(4, 6))
    assert not any("refused" in asked for asked in inner.asked[before:])


def test_an_error_of_inductors_is_the_users_under_its_own_name(inner, warned):
    inner.never = True
    with pass_mode.enabled(), pytest.raises(InductorError, match="no such kernel"):
        compare(enabled)
    with pass_mode.enabled(strict=True), pytest.raises(Exception, match="no such kernel") as raised:
        compare(enabled)
    assert isinstance(raised.value.inner_exception, FallbackError)
    assert not warned()


@pytest.mark.parametrize("compiler", [coda, torch.compile])
def test_inductor_itself(compiler, break_pass, monkeypatch, warned):
    """Its own lowering raises, its own code runs."""

    def lower(_):
        raise NotImplementedError(TEXT)

    monkeypatch.setitem(lowering.lowerings, REFUSED, lower)
    monkeypatch.setattr(op_by_op, "compile_fx_inner", inductor.compile_fx_inner)
    break_pass("norm")
    with config.patch({"cpp.simdlen": 0}), pass_mode.enabled():
        compare(compiler, grad=False)
    assert left_out(warned) == ["norm"]
    (said,) = warned()
    assert f"LoweringException: NotImplementedError: {TEXT}" in said
