# SPDX-License-Identifier: Apache-2.0
"""Tuning on a GPU that nothing is known of: each compilation is a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

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

measured, one = [], tuner.Tuner._measure_site

def noted(self, site, deadline):
    found = one(self, site, deadline)
    measured.append(key_of(site))
    return found

tuner.Tuner._measure_site = noted
model = make(width=2048, hidden=8192)
xs = [torch.randn(1, 4096, 2048, device="cuda").bfloat16() for _ in range(2)]
options = {"tune": "always", "tune_seconds": 150, "strict": True}
with torch.no_grad():
    eager = model(*xs)
    got = torch.compile(model, backend="coda", options=options)(*xs)
    exact = model.float()(*(x.float() for x in xs))
print(json.dumps({
    "measured": measured,
    "sites": {s.site: s.how for s in coda_inductor.reports()[-1].sites},
    "own": {key: [f.name, min(f.us.values(), default=None), f.unfused, f.failed]
            for key, f in measurements_of(gpu_of()).user_rows().items()},
    "errors": [errors(got, exact), errors(eager, exact)],
}))
"""


def started(folder: Path) -> subprocess.Popen:
    (folder / "no tables").mkdir(exist_ok=True)
    own = {
        "CODA_TABLES": str(folder / "no tables"),
        "CODA_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",  # a graph is to be analysed every time
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "gpu")]),
    }
    command = [sys.executable, "-c", COMPILE]
    return subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen) -> dict:
    """What it found."""
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_two_measure_each_site_once_and_fuse_what_wins_and_the_next_measures_nothing(tmp_path):
    both = [ended(process) for process in [started(tmp_path) for _ in range(2)]]
    measured = [key for one in both for key in one["measured"]]
    assert len(measured) == len(set(measured))
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
    again = ended(started(tmp_path))
    assert again["measured"] == []
    assert again["sites"] == both[0]["sites"]


def test_a_candidate_of_which_one_tile_is_wrong_is_found(monkeypatch):
    site = Site(kinds()["rms_partial"], 1024, 1024, 1024)
    bad, *others = found = [str(config) for config in choice.candidates(site, gpu_of())[:3]]
    as_, bs, _ = inputs(site.program, 8, 64, 64)
    wanted = [r for config in found for r in requests(as_, bs, site.program.to_json(), config)]
    assert not any(wait(wanted).values())
    launch = worker.gemm_epilogue

    def kernel(as_, bs, operands, text, config, *rest, **how):
        made = launch(as_, bs, operands, text, config, *rest, **how)
        if config == bad:
            for x in made:
                x[:128, :128] = 0
        return made

    monkeypatch.setattr(worker, "gemm_epilogue", kernel)
    said: list[dict] = []
    Worker(said.append).answer({"site": site_text(site), "configs": [bad, *others]})
    assert [x["trying"] for x in said[:-1]] == [bad, *others]
    _, found = from_row({"key": "", **said[-1]["figures"]})
    assert found.failed.keys() == {bad}
    assert found.failed[bad].startswith("wrong: ")
    assert list(found.us) == others
