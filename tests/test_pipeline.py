# SPDX-License-Identifier: Apache-2.0
"""The list of passes: one vocabulary of names, each of which can be disabled. Where one fails, at
its start or end, the graph is put back: it compiles, to eager's numbers, with a warning."""

import copy
import re
import shutil
from pathlib import Path

import pytest
import torch
from checking import assert_same, count_as_large, replace_pass
from harness import Harness
from torch._dynamo.utils import counters
from zoo.layers import Everything, T

from coda_inductor import OptionError, log, pipeline
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


class Failing:
    """``function`` that raises when it is entered, or when it has worked and damaged the graph."""

    def __init__(self, function, how):
        self.function, self.how, self.failed = function, how, False

    def __call__(self, graph, *args, **kwargs):
        self.failed = True
        if self.how == "end":
            self.function(graph, *args, **kwargs)
            for node in graph.nodes:
                node.args = ()  # what is not put back computes nothing
        raise IndexError("a bug of ours")


@pytest.mark.parametrize(("names", "how"), [
    (OTHERS[::2], "start"), (NEEDED, "start"), (OTHERS, "end"),
])  # fmt: skip
def test_wherever_passes_fail_the_graph_is_put_back(names, how, monkeypatch, caplog):
    """Others find what those have left; numbers survive."""
    failing = [replace_pass(monkeypatch, name, lambda run: Failing(run, how)) for name in names]
    compare(Harness(strict=False))
    assert all(each.failed for each in failing)
    (text,) = [text for text in caplog.messages if "a bug of ours" in text]  # they are of one kind
    assert f": pass {names[0]} falls back to Inductor" in text
