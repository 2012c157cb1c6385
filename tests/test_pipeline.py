# SPDX-License-Identifier: Apache-2.0
"""The list of passes: one vocabulary of names, each of which can be disabled. Wherever one fails,
at its start, half way or at its end, the graph is put back: it compiles, to eager's numbers, with
one warning."""

import copy
import re
import shutil
from pathlib import Path

import pytest
import torch
from checking import assert_same, count_as_large, replace_pass
from harness import Harness
from torch._dynamo.utils import counters
from torch.fx import Graph, Node
from zoo.layers import Everything, T

from coda_inductor import OptionError, log, pipeline
from coda_inductor.graph.snapshots import restore, snapshot
from coda_inductor.options import parse
from coda_inductor.patterns import loading
from coda_inductor.record import Record

ROOT = Path(__file__).resolve().parents[1]

#: What the model does to every rewrite.
COUNTERS = [
    "constant_mask", "cross_entropy", "cross_entropy_backward", "embedding_backward", "epilogue",
    "grouped_heads", "residual", "rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward",
]  # fmt: skip
PASSES = [*pipeline.ON_DYNAMO, *pipeline.ON_ATEN]
NAMES = list(dict.fromkeys(each.name for each in PASSES))
#: Without one of these only these run.
NEEDED = list(dict.fromkeys(each.name for each in PASSES if each.needed))
OTHERS = [name for name in NAMES if name not in NEEDED]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tensors count as large, and warnings are spoken."""
    count_as_large(monkeypatch)
    log.forget_warnings()


def compare(compiler):
    """Loss, logits and gradients of a step are eager's."""
    torch.manual_seed(0)
    ours = Everything().double()
    eager = copy.deepcopy(ours)
    tokens = torch.arange(2 * T).view(2, T) % 7
    found = []
    for model, call in ((ours, torch.compile(ours, backend=compiler)), (eager, eager)):
        loss, logits = call(tokens, tokens.roll(1, 1))
        loss.backward()
        found.append((loss, logits, [p.grad for p in model.parameters()]))
    assert_same(*found)


def test_architecture_names_every_pass_in_order():
    """A line may have several names, and what they do after two spaces."""
    listed = (ROOT / "docs" / "architecture.md").read_text().split("## The pipeline")[1]
    lines = [line for line in listed.split("```")[1].splitlines() if line.startswith("  ")]
    names = [name for line in lines for name in re.split(" {2,}", line.strip())[0].split(", ")]
    assert names == [each.name for each in PASSES]


def test_each_pass_comes_after_those_that_it_names():
    for passes in (pipeline.ON_DYNAMO, pipeline.ON_ATEN):
        names = [each.name for each in passes]
        for at, each in enumerate(passes):
            assert {*each.after} <= {*names[:at]}, each.name


def test_what_is_needed_cannot_be_disabled():
    for name in NEEDED:
        with pytest.raises(OptionError, match=f"the pass '{name}' cannot be disabled"):
            pipeline.check_names(Record(parse(None, {"disable": [name]})))


def test_names():
    """One is one function, no pass counts, and no user's pattern can take a counter of ours."""
    assert len(NAMES) == len({(each.name, each.run) for each in PASSES})
    assert {*NAMES}.isdisjoint(COUNTERS)
    ours = {name.removesuffix("_backward") for each in PASSES for name in each.counts}
    assert ours == set(loading.OTHER_NAMES)


def test_the_model_fires_every_counter_and_a_debug_folder_that_is_gone_costs_a_warning(
    tmp_path, caplog, monkeypatch
):
    gone = lambda run: lambda *given: (shutil.rmtree(tmp_path), run(*given))  # noqa: E731
    replace_pass(monkeypatch, "norm", gone)
    compare(Harness(debug=True, debug_dir=str(tmp_path)))
    assert counters["coda"] == {**dict.fromkeys(COUNTERS, 1), "residual": 3}
    assert caplog.text.count("cannot write") == 1


#: What changes a graph.
CHANGES = [(Graph, "create_node"), (Graph, "erase_node"), (Node, "replace_all_uses_with")]


class Failing:
    """``function`` that raises when it is entered, when it has done its work and damaged the graph,
    or in front of its ``how``-th change of a graph."""

    def __init__(self, function, how):
        self.function, self.how, self.changes, self.failed = function, how, 0, False

    def __call__(self, *args, **kwargs):
        if self.how == "start":
            self.fail()
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in CHANGES:
                patch.setattr(owner, name, self.counted(getattr(owner, name)))
            result = self.function(*args, **kwargs)
        if self.how == "end":
            for node in args[0].nodes:
                node.args = ()  # what is not put back computes nothing
            self.fail()
        return result

    def counted(self, change):
        def call(*args, **kwargs):
            self.changes += 1
            if self.changes == self.how:
                self.fail()
            return change(*args, **kwargs)

        return call

    def fail(self):
        self.failed = True
        raise IndexError("a bug of ours")


#: Passes that fail in one compilation, and when: at the start, at the end, or in front of which of
#: their changes. Of the latter none leaves another without work.
FAIL = [
    (OTHERS[::2], "start"), (NEEDED, "start"), (OTHERS, "end"), (("idioms",), 20),
    (("embedding", "decompose"), 20), (("norm", "fuse"), 20), (("packed", "loss", "recompute"), 1),
]  # fmt: skip


@pytest.mark.parametrize(("names", "how"), FAIL)
def test_wherever_passes_fail_the_graph_is_put_back(names, how, monkeypatch, caplog):
    """Others find what those have left; numbers survive. Between two changes a net inside a pass
    may catch it: one match is lost then, or one GEMM."""
    failing = [replace_pass(monkeypatch, name, lambda run: Failing(run, how)) for name in names]
    compare(Harness(strict=False))
    assert all(each.failed for each in failing)
    warnings = [text for text in caplog.messages if "a bug of ours" in text]
    if how in ("start", "end"):  # they are of one kind
        assert f": pass {names[0]} falls back to Inductor" in warnings[0]
    assert len(warnings) <= 1


def test_a_graph_out_of_order_is_put_back():
    """As it is between a rewrite and the sorting after it."""
    graph = Graph()
    x = graph.placeholder("x")
    x._dynamo_source, x.meta["val"] = "L['x']", 1
    first = graph.call_function(torch.sin, (x,))
    second = graph.call_function(torch.cos, (first,))
    output = graph.output((second,))
    output.meta["desc"] = "an output"
    kept = snapshot(graph)
    x.meta["val"] = 2
    second.append(first)
    with graph.inserting_before(output):
        graph.call_function(torch.tan, (second,))
    second.args = (first, first)
    restore(graph, kept)
    graph.lint()
    assert [n.target for n in graph.nodes] == ["x", torch.sin, torch.cos, "output"]
    assert next(iter(graph.nodes)) is x
    assert x.meta["val"] == 1
    assert graph.output_node().meta == {"desc": "an output"}
