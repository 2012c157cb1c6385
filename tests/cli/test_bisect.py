# SPDX-License-Identifier: Apache-2.0
"""``python -m coda_inductor bisect``: what it finds, what it says, and its exit code."""

import pytest
from processes import python
from zoo.users import write

from coda_inductor.__main__ import main

#: A script that is bad unless ``CONDITION`` holds for ``out``, the names that are left out.
FAKE = """
import json, os, pathlib, sys
out = set(os.environ["CODA_DISABLE"].split(","))
names = {
    "changed": ["idioms", "norm", "fp8", "fuse"],
    "fired": {"rms_norm": 4, "swiglu": 2, "epilogue": 3},
    "fused": ["layers.0.gate + up", "layers.0.down", "layers.1.gate + up", "layers.1.down"],
}
if "CODA_DEBUG_DIR" in os.environ:
    folder = pathlib.Path(os.environ["CODA_DEBUG_DIR"], "graph_000")
    folder.mkdir(exist_ok=True)
    (folder / "names.json").write_text(json.dumps(names))
if not (CONDITION):
    sys.exit(" ".join(["they differ", *sys.argv[1:]]))
"""


@pytest.fixture
def search(tmp_path, capsys):
    """Exit code, result and error of a search, for a condition."""

    def searched(condition, *args):
        path = write(tmp_path, FAKE.replace("CONDITION", condition), "script.py")
        code = main(["bisect", path, *args])
        said = capsys.readouterr()
        return code, said.out.replace(path, "script.py"), said.err

    return searched


IT = "makes script.py fail: they differ. It succeeds with options={'disable':"
CASES = {
    "out & {'*', 'norm', 'rms_norm'}":
        f"The pass `norm` (pattern or counter `rms_norm`) {IT} ['rms_norm']}} or "
        "CODA_DISABLE='rms_norm'.",
    "'*' in out or {'fp8', 'norm'} <= out": f"Each of `norm` and `fp8` {IT} ['norm', 'fp8']}}",
    "out & {'*', 'fuse', 'swiglu', 'gemm:layers.1.gate'}":
        "at the GEMM `layers.1.gate`: they differ. It succeeds with "
        "options={'disable': ['gemm:layers.1.gate']}",
    "out & {'*', 'fuse'} or {'gemm:layers.0.up', 'gemm:layers.1.down'} <= out":
        "The pass `fuse` makes script.py fail, at the GEMM `layers.0.up` first: they differ. It "
        "succeeds with options={'disable': ['fuse']}",
    "'*' in out": "succeeds with stock Inductor, which CODA_DISABLE='*' chooses",
}  # fmt: skip


@pytest.mark.parametrize("condition", CASES, ids=["pattern", "passes", "gemm", "gemms", "needed"])
def test_what_makes_a_script_fail(condition, search):
    code, found, runs = search(condition)
    assert code == 0
    assert CASES[condition] in found
    assert runs.startswith("run 1, as it is: bad (they differ)\n")


def test_what_falls_back(search):
    """The script succeeds, but not where a fallback is an error."""
    code, found, runs = search("'CODA_STRICT' not in os.environ or out & {'*', 'norm'}")
    assert code == 0
    assert "The pass `norm` makes script.py with CODA_STRICT=1 fail: they differ" in found
    assert runs.startswith("run 1, as it is: good\nrun 2, with CODA_STRICT=1: bad (they differ)\n")


def test_nothing_to_find(search):
    assert main(["bisect", "nowhere.py"]) == 2
    for condition, text in (("True", "succeeds here"), ("False", "not the cause")):
        code, found, said = search(condition, "--steps")
        assert (code, found) == (1, "")
        assert text in said
    assert "they differ --steps" in said  # its arguments


#: A search whose runs are forks of a process that has imported all, without code generation.
FORKS = """
import os, runpy, sys
from apart import apart
from harness import as_it_is
from coda_inductor import backend, op_by_op
from coda_inductor.__main__ import main
from coda_inductor.cli import bisect

def work(command, environment):
    os.environ.update(environment)
    op_by_op.compile_fx_inner = as_it_is
    runpy.run_path(command[1])

def run(command, environment):
    try:
        apart(work, command, environment)
    except RuntimeError as error:
        return str(error)
    return ""

bisect._run = run
assert not main(["bisect", sys.argv[1]])
"""
#: Gate and meaning differ for larger values than those that a pattern file is tried with.
GATE = """
import torch.nn.functional as F
from coda_inductor import Pattern

def meaning(gate, up):
    return F.mish(gate.clamp(max=500.0)) * up

def mish(gate, up):
    return F.mish(gate) * up

PATTERN = Pattern(name="own_glu", meaning=meaning, idioms=(mish,))
"""
SCRIPT = """
import torch
from zoo.users import mish, model

torch.manual_seed(0)
net = model(lambda g, u: mish(1000 * g, u), 1)
x = torch.randn(8, 16, dtype=torch.float64)
with torch.no_grad():
    got = torch.compile(net, backend="coda", options={"patterns": PATTERNS})(x)
    torch.testing.assert_close(got, net(x))
"""


def test_a_users_wrong_pattern(tmp_path):
    script = SCRIPT.replace("PATTERNS", repr([write(tmp_path, GATE)]))
    found = python("-c", FORKS, path := write(tmp_path, script, "wrong.py"))
    said = f"The pass `idioms` (pattern or counter `own_glu`) makes {path} fail"
    assert said in found.stdout, found.stderr[-3000:]
