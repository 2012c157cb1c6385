# SPDX-License-Identifier: Apache-2.0
"""No pass changes how a tensor lies in memory where another op, or the caller, sees that."""

import pytest
import torch
from checking import check, check_gradients
from harness import Harness, Stock
from zoo import seen

from coda_inductor import pipeline
from coda_inductor.errors import FallbackError
from coda_inductor.graph.aliases import inspected, spectator
from coda_inductor.graph.edit import Put, prune
from coda_inductor.graph.nodes import aten

#: What each pass leaves in the graph if it lays something out anew.
MARKS = {"rows": "aten.clone.default", "fuse": "aten.cat.default"}


def laid_out(name, harness):
    if name == "packed":
        return 2 * seen.D not in [site.shape[1] for site in harness.report.sites]
    ops = harness.ops()
    return ops[MARKS[name]] + ops["coda_inductor.columns.default"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("reader", seen.SEEING)
@pytest.mark.parametrize("name", seen.PROGRAMS)
def test_a_reader_of_memory_reads_what_it_read(name, reader, grad):
    function = seen.PROGRAMS[name](seen.SEEING[reader])
    run = check_gradients if grad else check
    run(function, *seen.arguments(grad), gate="always", strides=True)


@pytest.mark.parametrize("reader", seen.BLIND)
@pytest.mark.parametrize("name", seen.PROGRAMS)
def test_a_reader_of_elements_prevents_nothing(name, reader):
    harness = check(seen.PROGRAMS[name](seen.BLIND[reader]), *seen.arguments(), gate="always")
    assert laid_out(name, harness)


def test_reasons():
    function = seen.stream(seen.SEEING["as_strided"])
    report = check(function, *seen.arguments(), gate="always").report
    (why,) = [r for r in report.refusals if r.code == "memory-seen"]
    assert str(why).startswith("rows at permute")
    assert "as_strided depends on how" in why.text
    function = seen.halves(seen.SEEING["exact"])
    report = check(function, *seen.arguments(), gate="always").report
    assert [r.what for r in report.refusals if r.code == "memory-seen"] == ["packed projection"]


def careless(graph, _record):
    """Change the layout of each sine without asking."""
    for node in graph.find_nodes(op="call_function", target=aten.sin.default):
        put, like = Put(node, node.next), {"memory_format": torch.contiguous_format}
        turned = put.transpose(put(aten.clone.default, put.transpose(node), **like))
        node.replace_all_uses_with(turned, delete_user_cb=lambda n, new=turned: n not in chain(new))
        prune([node])


def chain(node):
    return [node, node.args[0], node.args[0].args[0]]


@pytest.mark.parametrize("reader", ["as_strided", "exact", "returned"])
def test_a_pass_that_does_not_ask_is_undone_and_named(reader, monkeypatch, caplog):
    steps = (pipeline.Pass("careless", careless), *pipeline.ON_ATEN)
    monkeypatch.setattr(pipeline, "ON_ATEN", steps)
    function = seen.terms(seen.SEEING[reader])
    harness = check(function, *seen.arguments(), strict=False)
    assert harness.report.fired["epilogue"] or harness.fused
    assert "careless" in caplog.text
    assert "lies in memory" in caplog.text
    with pytest.raises(Exception, match="pass careless") as raised:
        Harness().run(function, *seen.arguments())
    assert FallbackError.__name__ in repr(raised.value)
    check(seen.terms(seen.BLIND["a copy"]), *seen.arguments())


def test_ops_that_see_memory():
    def function(x):
        y = x * 2
        return y.view(torch.int64), y.sum(), y.t().as_strided((2,), (1,)).clone()

    stock = Stock()
    stock.run(function, torch.randn(4, 6, dtype=torch.float64))
    by_name = {str(n.target): n for n in stock.graph.nodes}
    sees = {name for name, node in by_name.items() if inspected(node)}
    assert sees == {"aten.view.dtype", "aten.as_strided.default", "output"}
    assert spectator(by_name["aten.mul.Tensor"]).target is aten.view.dtype
    assert spectator(by_name["aten.sum.default"]) is by_name["output"]
