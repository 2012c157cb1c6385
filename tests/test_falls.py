# SPDX-License-Identifier: Apache-2.0
"""A graph of ours that does not compile costs our passes, and the one of the user is compiled."""

import copy
import re

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
    return x.clone()


@refused.register_fake
def _(x):
    return torch.empty_like(x)


refused.register_autograd(lambda _, gradient: refused(gradient))
REFUSED = torch.ops.coda_tests.refused.default


def refuse(graph):
    """Insert the op before the first one of ``graph``."""
    insert(graph, REFUSED, lambda x: x)


def wrong_shape(graph):
    insert(graph, torch.ops.aten.t.default, lambda x: x.t())


def wrong_dtype(graph):
    insert(graph, torch.ops.prims.convert_element_type.default, lambda x: x.half(), torch.half)


def insert(graph, op, of, *others):
    key = next(k for k in ("example_value", "val") for n in graph.nodes if k in n.meta)
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        for x in node.all_input_nodes:
            value = x.meta.get(key)
            if isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point():
                with graph.inserting_before(node):
                    new = graph.call_function(op, (x, *others))
                new.meta = {**node.meta, key: of(value)}
                node.replace_input_with(x, new)
                return


@pytest.fixture(autouse=True)
def inner(monkeypatch, warned):
    """Inductor without code, which refuses graphs with that op; ``inner.asked``: what it got."""

    def compile_fx_inner(gm, inputs, **how):
        asked = "backward" if how.get("is_backward") else "forward"
        if compile_fx_inner.never or any(n.target is REFUSED for n in gm.graph.nodes):
            compile_fx_inner.asked.append(f"{asked} refused")
            gm.graph.erase_node(gm.graph.output_node())  # its passes have been at work
            raise InductorError(LoweringException(RuntimeError(TEXT), "op", [], {}), None)
        compile_fx_inner.asked.append(asked)
        return as_it_is(gm, inputs, **how)

    compile_fx_inner.asked, compile_fx_inner.never = [], False
    monkeypatch.setattr(op_by_op, "compile_fx_inner", compile_fx_inner)
    monkeypatch.setattr(falls, "_failed", set())
    coda_inductor.report.forget()
    return compile_fx_inner


@pytest.fixture
def break_pass(monkeypatch):
    """Let a pass write something bad after its own work."""

    def breaks(name, write=refuse):
        wanted = {each.name: each.when for each in (*pipeline.ON_DYNAMO, *pipeline.ON_ATEN)}[name]

        def broken(run):
            def both(graph, record):
                if wanted(graph, record):
                    run(graph, record)
                write(graph)

            return both

        replace_pass(monkeypatch, name, broken, when=lambda *_: True)

    return breaks


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


def fell(warned):
    """The passes that the only warning lists."""
    (said,) = warned()
    return re.findall(r"\w+", said.split("with our passes")[1].split("it does")[0])


@pytest.mark.parametrize(("name", "may_be_left_out"), [
    ("in_place", True), ("fp8_rest", True), ("plan", False), ("refresh_views", False),
])  # fmt: skip
def test_the_users_graph_is_compiled(name, may_be_left_out, break_pass, inner, warned):
    """Once, with one warning that has all of the error and the passes that may have caused it."""
    break_pass(name)
    compare()
    assert (name in fell(warned)) == may_be_left_out
    assert TEXT in warned()[0]
    assert inner.asked == ["forward refused", "forward", "backward"]
    assert not coda_inductor.reports()
    assert not counters["coda"]


@pytest.mark.parametrize(("name", "write"), [("in_place", wrong_shape), ("idioms", wrong_dtype)])
def test_wrong_shapes_and_dtypes(name, write, break_pass, inner, warned):
    """AOTAutograd finds them before Inductor sees anything."""
    break_pass(name, write)
    with pass_mode.enabled():
        compare(enabled if name == "in_place" else coda)
    assert name in fell(warned)
    assert inner.asked == ["forward", "backward"]


def test_checkpointed_regions_are_put_back(break_pass, warned):
    def regions(model):
        return coda(lambda x: checkpoint(model, x, use_reentrant=False))

    break_pass("idioms", wrong_shape)
    compare(regions)
    assert fell(warned) == ["idioms"]


def test_a_graph_from_torchs_cache_warns_of_no_reports_that_nobody_asked_for(monkeypatch, warned):
    monkeypatch.setitem(counters["inductor"], "fxgraph_cache_hit", 1)
    compare(grad=False)
    assert not warned()
    coda_inductor.report.forget()
    assert not coda_inductor.reports()
    assert "no reports" in warned()[0]


def test_only_the_backward_graph(break_pass, inner, warned):
    """It is compiled when its forward graph cannot change any more, and runs op by op."""

    def backward(graph):
        tangent = next(n for n in graph.nodes if "tangents" in str(n.target))
        with graph.inserting_after(tangent):
            new = graph.call_function(REFUSED, (tangent,))
        new.meta = dict(tangent.meta)
        tangent.replace_all_uses_with(new, lambda user: user is not new)

    break_pass("fuse", backward)
    compare()
    assert inner.asked == ["forward", "backward refused"]
    assert len(warned()) == 1


def test_what_failed_is_remembered(break_pass, inner, monkeypatch, warned):
    """For other sizes too, but not for other options or parameters, of which the same ops may
    compile; and not without bound."""
    monkeypatch.setattr(falls, "_MOST", 2)
    break_pass("fuse")
    for how in ({}, {"rows": (7, 4), "dynamic": True}):
        compare(**how)
        torch._dynamo.reset()
    assert inner.asked == ["forward refused", *["forward", "backward"] * 2]
    assert len(falls._failed) == 1
    other = Gated(2 * D, 16, norm=nn.RMSNorm, front=True, down=False, residual=False).double()
    for model, options in ((whole().double(), {"disable": ["swiglu"]}), (other, {})):
        inner.asked.clear()
        coda(model, options=options)(torch.randn(3, model.norm.weight.numel()).double())
        assert inner.asked[0] == "forward refused"
        torch._dynamo.reset()
    assert len(falls._failed) == 1, "two, and then a third one"


def test_a_lack_of_memory_is_not_remembered(monkeypatch, inner, warned):
    def compile_fx_inner(gm, inputs, **how):
        if raised:
            raise InductorError(raised.pop(), None)
        return as_it_is(gm, inputs, **how)

    monkeypatch.setattr(op_by_op, "compile_fx_inner", compile_fx_inner)
    raised = [torch.OutOfMemoryError("no room")]
    compare()
    assert ["no room" in said for said in warned()] == [True]
    torch._dynamo.reset()
    compare()
    assert coda_inductor.reports()


def test_where_inductor_cannot_compile_the_users_graph(inner, warned):
    """It runs op by op, no pass is accused, and nothing is remembered."""
    inner.never = True
    compare()
    assert [TEXT in text for text in warned()] == [True, True]
    assert inner.asked == ["forward refused", "forward refused", "backward refused"]
    assert not falls._failed


@pytest.mark.parametrize("name", sorted(falls.HELD))
def test_it_stays_where_the_graph_needs_it(name, break_pass, inner, warned):
    break_pass(name)
    compare()
    assert [text.split()[0] for text in inner.asked] == ["forward", "backward"]
    torch._dynamo.reset()
    with pass_mode.enabled(), pytest.raises(InductorError, match="no such kernel"):
        compare(enabled)


def test_strict(break_pass, inner):
    break_pass("norm")
    for compiler, how in ((coda, {"options": {"strict": True}}), (enabled, {})):
        with pass_mode.enabled(strict=True), pytest.raises(Exception, match="no such") as raised:
            compare(compiler, **how)
        error = getattr(raised.value, "inner_exception", raised.value)
        assert isinstance(error, FallbackError)
        torch._dynamo.reset()
    assert inner.asked == ["forward refused"] * 2


def enabled(model, **how):
    """As torch.compile(model) calls it, with that Inductor."""

    def backend(gm, inputs):
        return inductor.compile_fx(gm, inputs, inner_compile=op_by_op.compile_fx_inner)

    return torch.compile(model, backend=backend, **how)


def test_inductor_itself(break_pass, monkeypatch, warned):
    """Its own lowering raises, its own code runs."""

    def lower(_):
        raise NotImplementedError(TEXT)

    monkeypatch.setitem(lowering.lowerings, REFUSED, lower)
    monkeypatch.setattr(op_by_op, "compile_fx_inner", inductor.compile_fx_inner)
    break_pass("norm")
    with config.patch({"cpp.simdlen": 0}), pass_mode.enabled():
        compare(torch.compile, grad=False)
    assert "norm" in fell(warned)
    assert f"LoweringException: NotImplementedError: {TEXT}" in warned()[0]
