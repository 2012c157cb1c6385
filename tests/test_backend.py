# SPDX-License-Identifier: Apache-2.0
"""The entry point end to end: debug output, logs, counters, fallback, strictness, user passes.

Final graphs run op by op, which saves seconds a compile; test_inductor.py has Inductor's code.
"""

import ast
import copy
import functools
import itertools
import logging

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo.layers import D, whole

import coda_inductor
from coda_inductor import OptionError, debug, joint, log
from coda_inductor.backend import coda
from coda_inductor.debug import DebugFolder
from coda_inductor.joint import JointPass
from coda_inductor.mainloop import availability
from coda_inductor.options import parse
from coda_inductor.record import Record

pytestmark = pytest.mark.usefixtures("without_code")


@pytest.fixture
def messages():
    """Formatted messages of our logger, all levels."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    level = log.logger.level
    log.logger.addHandler(handler)
    log.logger.setLevel(logging.DEBUG)
    log.forget_warnings()
    yield lines
    log.logger.removeHandler(handler)
    log.logger.setLevel(level)


def run(model, *args, **options):
    with torch.no_grad():
        ours = torch.compile(model, backend=coda, options=options)(*args)
        return ours, model(*args)


def warnings_of(messages):
    return [line for line in messages if line.startswith("WARNING")]


def test_debug_folder(tmp_path):
    """Its name is the graph's, as in the report."""
    model, options = whole().bfloat16(), {"debug": True, "debug_dir": str(tmp_path / "debug")}
    named = functools.partial(coda, name="prefill", options=options)
    with torch.no_grad():
        torch.compile(model, backend=named)(torch.randn(3, D).bfloat16())
    (folder,) = (tmp_path / "debug").iterdir()
    assert folder.name.startswith("prefill")
    assert coda_inductor.reports()[-1].name == "prefill"
    stages = ["0_before.py", "1_raised.py", "2_traced.py", "3_rewritten.py", "4_fused.py"]
    assert sorted(path.name for path in folder.glob("*.py")) == stages
    text = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
    for source in folder.rglob("*.py"):
        ast.parse(source.read_text(), str(source))
    raised = ["coda_inductor.rms_norm" in text[stage] for stage in stages[:4]]
    assert raised == [False, True, True, False]
    assert all(
        name in text["gemms.txt"] for name in ("rms_norm", "residual", "3 x 8 x 8", "3 x 16 x 8")
    )
    found = coda_inductor.reports()[-1]
    assert found.folder == str(folder)
    for site in found.sites:
        assert site.program.key + ".py" in text
        assert str(site.program) in text[site.program.key + ".txt"]
        again = coda_inductor.EpilogueProgram.from_json(text[site.program.key + ".json"])
        assert again == site.program
        assert "def epilogue(acc" in text[site.program.key + ".py"]


def test_gemms_and_everything_can_be_disabled(without_code):
    fused = {}
    for names in ("gemm:o", "gemm:up", "*"):
        coda_inductor.report.forget()
        torch._dynamo.reset()
        torch.testing.assert_close(
            *run(whole().double(), torch.randn(3, D).double(), disable=names)
        )
        found = [site for each in coda_inductor.reports() for site in each.sites]
        fused[names] = {site.site: site.fused for site in found}
    assert fused == {
        "gemm:o": {"o": False, "gate + up": True},
        "gemm:up": {"o": True, "gate": True, "up": False},
        "*": {},
    }


def test_debug_folder_that_another_rank_makes_first_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(debug, "_numbers", itertools.count())
    (tmp_path / "graph_000").symlink_to("nowhere")  # mkdir meets what exists() has not seen
    assert DebugFolder("graph", str(tmp_path)).folder == tmp_path / "graph_001"


def test_debug_folder_that_cannot_be_made_reaches_the_user(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to("nowhere")
    for parent in (file, link):
        with pytest.raises(OptionError, match=r"'debug_dir': .*CODA_DEBUG_DIR") as caught:
            run(torch.sin, torch.randn(3), debug=True, debug_dir=str(parent))
        assert repr(str(parent)) in str(caught.value)


def test_unsupported_gemm_warns_once_naming_site_and_cause(messages):
    def one(x, w):
        return (x @ w) + 1

    x, w = torch.ones(3, D).long(), torch.ones(D, D).long()
    for function in (one, one, lambda x, w: one(one(x, w), w)):
        torch._dynamo.reset()
        ours, eager = run(function, x, w)
        assert torch.equal(ours, eager)
    (warning,) = warnings_of(messages)
    assert "GEMM mm falls back to Inductor: " in warning
    assert "torch.int64" in warning


def test_wrong_option_or_mode_reaches_the_user():
    """As the error that it is, which ends with our text. Who catches Dynamo's gets it too, and
    processes that pickle errors can."""
    with pytest.raises(OptionError, match=r"^unknown option 'speed' .* accepted too$") as caught:
        run(torch.sin, torch.randn(3), speed=11)
    assert isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed)
    assert "speed" in str(caught.value.inner_exception)
    again = copy.copy(caught.value)  # as pickle does it
    assert (type(again), str(again)) == (OptionError, str(caught.value))
    with pytest.raises(OptionError, match="unknown mode 'warp'"):
        coda(torch.fx.symbolic_trace(torch.nn.Identity()), [torch.randn(3)], mode="warp")


class UsersPass(CustomGraphPass):
    """Counts its calls; ``version`` is its uuid."""

    def __init__(self, version="1"):
        self.version, self.calls = version, 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return self.version


def uuid(before=None, **options):
    return JointPass(Record(parse(None, options)), before).uuid()


#: What changes what is made of a graph.
OPTIONS = [
    {"gate": "never"}, {"disable": ["swiglu"]}, {"strict": True}, {"fp16_norms": True},
    {"reference": True}, {"tune": "always"}, {"tune": "never"}, {"tune_seconds": 5},
    {"memory": 0.5}, {"memory": 0.4}, {"memory": "1 GiB"}, {"numerics": "eager"},
]  # fmt: skip


def test_uuid_changes_with_what_changes_a_graph_and_with_nothing_else(monkeypatch, tmp_path):
    before, path = uuid(), tmp_path / "mine.py"
    assert isinstance(before, str)
    found = [before, *(uuid(**options) for options in OPTIONS)]
    found += [uuid(UsersPass("1")), uuid(UsersPass("2"))]
    for name in ("measurements", "versions"):
        with monkeypatch.context() as patch:
            patch.setitem(joint.QUACK.facts, name, lambda: ("another",))
            found.append(uuid())
    for text in ("x = 1\n", "x = 2\n"):
        path.write_text(text)
        found.append(uuid(patterns=str(path)))
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        found.append(uuid())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    found.append(uuid())  # collectives beside kernels: another kernel is taken
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert len({*found}) == len(found)
    assert uuid() == before
    assert uuid(UsersPass("1")) == found[len(OPTIONS) + 1]


def test_nothing_is_cached_while_debugging_or_behind_an_unknown_pass(tmp_path):
    assert uuid(debug=True, debug_dir=str(tmp_path)) is None
    assert uuid(UsersPass(None)) is None
    assert uuid(lambda graph: None) is None
    assert uuid([UsersPass("1"), lambda graph: None]) is None
    assert uuid([UsersPass("1"), UsersPass("2")]) != uuid([UsersPass("2"), UsersPass("1")])
    ours = JointPass(Record(parse(None, {}), "test"))  # ``torch.compile`` copies the configuration
    ours.record.fake = FakeTensorMode().from_tensor(torch.ones(1))  # which cannot be copied
    assert copy.deepcopy({"joint_custom_pre_pass": ours}) == {"joint_custom_pre_pass": ours}


@pytest.mark.parametrize("case", ["large", "small", "cpu", "never"])
def test_a_compile_server_starts_before_a_large_graph_is_traced(case, monkeypatch):
    started = []
    monkeypatch.setattr(joint.pool, "warm_up", lambda: started.append(True))
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        size, device = 64 if case == "small" else 2048, "cpu" if case == "cpu" else "cuda"
        weight = torch.empty(size, size, device=device)
    graph = torch.fx.symbolic_trace(lambda x, y: x)
    options = parse(None, {"gate": "never"} if case == "never" else None)
    joint.begin(graph, [weight, 3], Record(options, "graph"))
    assert bool(started) == (case == "large")
