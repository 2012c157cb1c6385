# SPDX-License-Identifier: Apache-2.0
"""Tuning on a GPU that nothing is known of: each compilation is a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest
from oracle import NEEDS_KERNELS
from programs import inputs, kinds

from coda_inductor.gpu import gpu_of
from coda_inductor.runtime.launch import requests
from coda_inductor.runtime.pool import wait
from coda_inductor.select import choice
from coda_inductor.select.figures import from_row
from coda_inductor.select.site import Site, site_text
from coda_inductor.tune import worker
from coda_inductor.tune.worker import Worker

pytestmark = NEEDS_KERNELS

TESTS = Path(__file__).resolve().parents[1]
#: Compiles a layer and prints what was measured and fused, and how far off it is.
COMPILE = """
import json
import torch
import coda_inductor
from coda_inductor.gpu import gpu_of
from coda_inductor.select.figures import key_of
from coda_inductor.select.measurements import measurements_of
from coda_inductor.tune import tuner
from layers import errors, make

measured, left = [], []
one, close = tuner.Tuner._measure_site, tuner.Tuner.close

def noted(self, site, deadline):
    found = one(self, site, deadline)
    measured.append(key_of(site))
    return found

def closed(self):
    left.extend(self.left)
    close(self)

tuner.Tuner._measure_site, tuner.Tuner.close = noted, closed
model = make(width=2048, hidden=8192)
xs = [torch.randn(1, 4096, 2048, device="cuda").bfloat16() for _ in range(2)]
options = {"tune": "always", "tune_seconds": 400, "strict": True}
with torch.no_grad():
    eager = model(*xs)
    got = torch.compile(model, backend="coda", options=options)(*xs)
    exact = model.float()(*(x.float() for x in xs))
store = measurements_of(gpu_of())
print(json.dumps({
    "measured": measured, "left": left, "known": store.gpu.sites is not None,
    "sites": {s.site: s.how for s in coda_inductor.reports()[-1].sites},
    "own": {key: [f.name, min(f.us.values(), default=None), f.unfused, f.failed]
            for key, f in store.user_rows().items()},
    "errors": [errors(got, exact), errors(eager, exact)],
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all compilations here: a cache, in which the first finds nothing."""
    return tmp_path_factory.mktemp("tuning")


def started(folder: Path) -> tuple[subprocess.Popen, IO[str]]:
    """Such a process, and the file of what it warns of: a pipe that nobody reads would stop it."""
    (folder / "no tables").mkdir(exist_ok=True)
    own = {
        "CODA_TABLES": str(folder / "no tables"),
        "CODA_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",  # a graph is to be analysed every time
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "gpu")]),
    }
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in ``ended``)
    command = [sys.executable, "-c", COMPILE]
    process = subprocess.Popen(
        command, env=os.environ | own, stdout=subprocess.PIPE, stderr=said, text=True
    )
    return process, said


def ended(process: subprocess.Popen, said: IO[str]) -> dict:
    with said:
        out, _ = process.communicate(timeout=900)
        said.seek(0)
        assert process.returncode == 0, said.read()[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def both(folder):
    """What two compilations say that start at once, with nothing known."""
    return [ended(*process) for process in [started(folder) for _ in range(2)]]


def test_together_they_measure_each_site_once_and_fuse_what_wins(both):
    measured = [key for one in both for key in one["measured"]]
    assert len(measured) == len(set(measured))
    assert not any(one["known"] or one["left"] for one in both)
    for one in both:
        assert one["own"].keys() == set(measured)
        assert one["sites"] == both[0]["sites"]
        for ours, eager in zip(*one["errors"], strict=True):
            assert 0 < ours <= 1.2 * eager
    own = both[0]["own"].values()
    assert not {name: failed for name, *_, failed in own if failed}
    wins = {name for name, us, unfused, _ in own if us and us < 0.995 * unfused}
    fused = {site for site, how in both[0]["sites"].items() if how == "kernel"}
    assert fused
    assert fused <= wins
    assert ("gate + up" in fused) == ("gate + up" in wins)


def test_the_next_process_measures_nothing(folder, both):
    again = ended(*started(folder))
    assert again["measured"] == []
    assert again["sites"] == both[0]["sites"]
    assert again["own"] == both[0]["own"]


@pytest.fixture(scope="module")
def candidates():
    """(site, three configs, compiled)."""
    site = Site(kinds()["rms_partial"], 1024, 1024, 1024)
    found = [str(config) for config in choice.candidates(site, gpu_of())[:3]]
    as_, bs, _ = inputs(site.program, 8, 64, 64)
    wanted = [r for config in found for r in requests(as_, bs, site.program.to_json(), config)]
    assert not any(wait(wanted).values())
    return site, found


@pytest.mark.parametrize("broken", ["zeros", "one tile"])
def test_a_candidate_that_is_wrong_is_found(candidates, broken, monkeypatch):
    site, (bad, *others) = candidates
    launch = worker.gemm_epilogue

    def kernel(as_, bs, operands, text, config, *rest, **how):
        made = launch(as_, bs, operands, text, config, *rest, **how)
        if config == bad:
            for x in made:
                x[:128, :128] = 0
                if broken == "zeros":
                    x.zero_()
        return made

    monkeypatch.setattr(worker, "gemm_epilogue", kernel)
    said: list[dict] = []
    Worker(said.append).answer({"site": site_text(site), "configs": [bad, *others]})
    assert [x["trying"] for x in said[:-1]] == [bad, *others]
    _, found = from_row({"key": "", **said[-1]["figures"]})
    assert found.failed.keys() == {bad}
    assert found.failed[bad].startswith("wrong: ")
    assert list(found.us) == others
    assert 0 < found.plain < found.unfused
    assert all(0 < us < 1000 for us in found.us.values())
    assert 0 <= found.spread < 0.2
