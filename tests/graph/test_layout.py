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

#: Name -> what fires once a pass has laid something out anew, how often beside all of seen.BLIND
#: ("rows" asks the caller of "elements", a sine that lies as what it reads), and how many readers
#: of seen.SEEING are asked.
PROGRAMS = {"rows": ("residual", 6, 8), "packed": ("swiglu", 4, 5), "fuse": ("epilogue", 4, 0)}


def run(compare, name, readers):
    """All of a kind in one graph, each beside a program of its own."""
    programs = [seen.PROGRAMS[name](read) for read in readers.values()]
    given = [seen.arguments(compare is check_gradients) for _ in readers]

    def function(given):
        return [program(*each) for program, each in zip(programs, given, strict=True)]

    return compare(function, given, gate="always", strides=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_readers_of_memory_read_what_they_read_and_readers_of_elements_prevent_nothing(name):
    counter, often, asked = PROGRAMS[name]
    harness = run(check, name, seen.BLIND)
    assert harness.counts[counter] == often
    harness = run(check_gradients, name, seen.SEEING)
    assert [r.code for r in harness.report.refusals].count("memory-seen") == asked


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
