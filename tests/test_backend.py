# SPDX-License-Identifier: Apache-2.0
"""The entry point end to end: debug output, logs, counters, fallback, strictness, user passes.

Final graphs run op by op, which saves seconds a compile; test_inductor.py has Inductor's code.
"""

import ast
import copy
import functools
import re

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo.layers import D, whole

import coda_inductor
from coda_inductor import OptionError, joint
from coda_inductor.backend import coda
from coda_inductor.joint import JointPass
from coda_inductor.options import parse
from coda_inductor.record import Record

pytestmark = pytest.mark.usefixtures("without_code")


def run(model, *args, **options):
    with torch.no_grad():
        ours = torch.compile(model, backend=coda, options=options)(*args)
        return ours, model(*args)


def test_debug_folder(tmp_path):
    """Its name is the graph's, as in the report."""
    model, options = whole().bfloat16(), {"debug": True, "debug_dir": str(tmp_path / "debug")}
    named = functools.partial(coda, name="prefill", options=options)
    with torch.no_grad():
        torch.compile(model, backend=named)(torch.randn(3, D).bfloat16())
    (folder,) = (tmp_path / "debug").iterdir()
    assert folder.name.startswith("prefill")
    stages = ["0_before.py", "1_raised.py", "2_traced.py", "3_rewritten.py", "4_fused.py"]
    assert sorted(path.name for path in folder.glob("*.py")) == stages
    for source in folder.rglob("*.py"):
        ast.parse(source.read_text(), str(source))
    found = coda_inductor.reports()[-1]
    assert (found.name, found.folder) == ("prefill", str(folder))
    for site in found.sites:
        again = next(folder.rglob(f"{site.program.key}.json")).read_text()
        assert coda_inductor.EpilogueProgram.from_json(again) == site.program


def test_gemms_and_everything_can_be_disabled():
    x = torch.randn(3, D).double()
    for names, fused in (("gemm:up", {"o", "gate"}), ("*", set())):
        coda_inductor.report.forget()
        torch._dynamo.reset()
        torch.testing.assert_close(*run(whole().double(), x, disable=names))
        sites = [site for each in coda_inductor.reports() for site in each.sites]
        assert {site.site for site in sites if site.fused} == fused


def test_debug_folder_that_cannot_be_made_reaches_the_user(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    with pytest.raises(OptionError, match=r"'debug_dir': .*link"):
        run(torch.sin, torch.randn(3), debug=True, debug_dir=str(link))


def test_unsupported_gemm_warns_once_naming_site_and_cause(warned):
    def one(x, w):
        return (x @ w) + 1

    x, w = torch.ones(3, D).long(), torch.ones(D, D).long()
    for function in (one, one, lambda x, w: one(one(x, w), w)):
        torch._dynamo.reset()
        ours, eager = run(function, x, w)
        assert torch.equal(ours, eager)
    (warning,) = warned()
    assert re.search("GEMM mm .*torch.int64", warning)


def test_wrong_option_or_mode_reaches_the_user():
    """As the error that it is, and as Dynamo's; processes can pickle it."""
    with pytest.raises(OptionError, match="unknown option 'speed'") as caught:
        run(torch.sin, torch.randn(3), speed=11)
    assert isinstance(caught.value, torch._dynamo.exc.BackendCompilerFailed)
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
    {"reference": True}, {"tune": "always"}, {"tune_seconds": 5}, {"memory": 0.5},
    {"numerics": "eager"},
]  # fmt: skip


def test_uuid_changes_with_what_changes_a_graph_and_with_nothing_else(monkeypatch, tmp_path):
    before, path = uuid(), tmp_path / "mine.py"
    found = [before, *(uuid(**options) for options in OPTIONS)]
    found += [uuid(UsersPass("1")), uuid(UsersPass("2"))]
    for name in ("measurements", "versions"):
        with monkeypatch.context() as patch:
            patch.setitem(joint.QUACK.facts, name, lambda: ("another",))
            found.append(uuid())
    for number in (1, 2):
        path.write_text(f"x = {number}")
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
