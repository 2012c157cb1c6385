# SPDX-License-Identifier: Apache-2.0
"""The list of passes: one vocabulary of names, each of which can be disabled; what the debug folder
says of them; and that there is no second list."""

import ast
import copy
import shutil
from pathlib import Path

import pytest
import torch
from blocks import T, Whole
from checking import assert_same, replace_pass
from harness import Harness

import coda_inductor
from coda_inductor import OptionError, pipeline
from coda_inductor.dynamo import late_gradients
from coda_inductor.dynamo.attention import calls
from coda_inductor.options import parse
from coda_inductor.patterns import loading
from coda_inductor.record import Record
from coda_inductor.rewrite import embedding, tables
from coda_inductor.runtime import linear_cross_entropy

#: What the model below makes every rewrite do.
COUNTERS = [
    "constant_mask", "cross_entropy", "cross_entropy_backward", "embedding_backward", "epilogue",
    "grouped_heads", "residual", "rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tensors count as large."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", 2**8)
    monkeypatch.setattr(late_gradients, "LEAST_BYTES", 0)
    monkeypatch.setattr(tables, "LEAST_READS", 1)
    monkeypatch.setattr(embedding, "LEAST_ROWS", 1)
    monkeypatch.setattr(calls, "GROUPS_ON", "cpu")


def train(**options):
    """The harness after a step; loss and gradients are eager's."""
    torch.manual_seed(0)
    ours, harness = Whole().double(), Harness(**options)
    eager = copy.deepcopy(ours)
    tokens = torch.arange(2 * T).view(2, T) % 7
    have = harness.train(ours, tokens, tokens.roll(1, 1))
    want = eager(tokens, tokens.roll(1, 1))
    for loss, _ in (have, want):
        loss.backward()
    assert_same(
        (have, [p.grad for p in ours.parameters()]), (want, [p.grad for p in eager.parameters()])
    )
    return harness


def test_the_model_fires_every_counter():
    assert sorted(train().counts) == COUNTERS


PASSES = [*pipeline.ON_DYNAMO, *pipeline.ON_ATEN]


#: What each does that fails alone, and so does not run, is in test_failing_passes.
THIRDS = [[each.name for each in PASSES if not each.needed][i::3] for i in range(3)]


@pytest.mark.parametrize("names", THIRDS, ids=lambda names: names[0])
def test_disabled_passes_do_not_run(names, monkeypatch):
    ran = []
    for stage in ("ON_DYNAMO", "ON_ATEN"):
        watched = tuple(
            pipeline.Pass(**{**vars(p), "run": lambda g, r, p=p: (ran.append(p.name), p.run(g, r))})
            for p in getattr(pipeline, stage)
        )
        monkeypatch.setattr(pipeline, stage, watched)
    train(disable=names)
    assert ran == [each.name for each in PASSES if each.name not in names]


@pytest.mark.parametrize("name", [each.name for each in PASSES if each.needed])
def test_what_is_needed_cannot_be_disabled(name):
    with pytest.raises(Exception, match=f"the pass '{name}' cannot be done without") as caught:
        train(disable=[name])
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), OptionError)


def test_a_name_is_one_function():
    names = {each.name for each in PASSES}
    assert len(names) == len({(each.name, each.run) for each in PASSES})
    assert names.isdisjoint(COUNTERS)


def test_no_pattern_of_a_users_can_take_a_counter_of_ours():
    """The name of a pass is free: "norm" would be a good one, and counts nothing."""
    ours = {name.removesuffix("_backward") for each in PASSES for name in each.counts}
    assert ours == set(loading.OTHER_NAMES)


def test_what_is_wrapped_around_one_graph_is_not_around_the_next():
    record = Record(parse(None, {"strict": True}))

    def around(compiled):
        return pipeline.on_dynamo(torch.fx.symbolic_trace(lambda x: (x.sin(),)), record)(compiled)

    record.around.append(lambda compiled: compiled + 1)
    assert around(1) == 2
    assert around(1) == 1


def test_a_debug_folder_that_is_gone_costs_a_warning(tmp_path, caplog):
    def gone(run):
        def call(graph, record):
            shutil.rmtree(tmp_path)
            run(graph, record)

        return call

    with pytest.MonkeyPatch.context() as patch:
        replace_pass(patch, "norm", gone)
        harness = train(debug=True, debug_dir=str(tmp_path))
    assert harness.counts["residual"]
    assert "cannot write" in caplog.text


def test_passes_are_called_from_the_list_only():
    """No other module runs a pass, but through the list."""
    package = Path(coda_inductor.__file__).parent
    functions = {getattr(each.run, "__name__", "") for each in PASSES} - {"<lambda>", "_decide"}
    callers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and {a.name for a in node.names} & functions:
                callers.add(path.relative_to(package).as_posix())
    assert callers == {"pipeline.py", "dynamo/attention/__init__.py"}
