# SPDX-License-Identifier: Apache-2.0
"""Through Inductor itself, code generation and caches included: few cases, each takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_backend import Block, D
from torch import nn
from torch._dynamo.utils import counters

from coda_inductor.backend import coda

ROOT = Path(__file__).resolve().parent.parent


def test_inference_through_the_entry_point():
    name = "coda" if "coda" in torch._dynamo.list_backends() else coda
    model, x = Block(), torch.randn(2, 3, D)
    compiled = torch.compile(model, backend=name, mode="default")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        # Other strides are another graph; the values are eager's.
        strided = torch.randn(3, 2, 2 * D)[..., ::2].transpose(0, 1)
        torch.testing.assert_close(compiled(strided), model(strided))
        expanded = torch.randn(1, 1, D).expand(2, 3, D)
        torch.testing.assert_close(compiled(expanded), model(expanded))
    # The residual stream of the transposed input is not row-major: its norm is left to Inductor.
    assert dict(counters["coda"]) == {"rms_norm": 2, "swiglu": 3, "residual": 2}


def test_output_strides_are_eagers():
    def function(x, y, w):
        return y + F.linear(x, w), F.linear(x, w).relu().view(2, 3, D).transpose(0, 1)

    x, y, w = torch.randn(6, D), torch.randn(D, 6).t(), torch.randn(D, D)
    with torch.no_grad():
        ours, eager = torch.compile(function, backend=coda)(x, y, w), function(x, y, w)
    for have, want in zip(ours, eager, strict=True):
        torch.testing.assert_close(have, want)
        assert have.stride() == want.stride()


def test_dynamic_shapes():
    model = Block()
    compiled = torch.compile(model, backend=coda, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 3), (5, 4), (1, 9)):
            x = torch.randn(*shape, D)
            torch.testing.assert_close(compiled(x), model(x))
    assert counters["coda"]["rms_norm"] >= 1


def test_training_gives_eagers_gradients():
    model, x = Block(), torch.randn(5, D, requires_grad=True)
    torch.compile(model, backend=coda)(x).sin().sum().backward()
    ours = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).sin().sum().backward()
    for have, tensor in zip(ours, [x, *model.parameters()], strict=True):
        torch.testing.assert_close(have, tensor.grad)
    # Residuals: x + o(x), and in the backward pass the gradient that x gets besides o's.
    fired = {"rms_norm": 1, "rms_norm_backward": 1, "swiglu": 1, "residual": 2}
    assert dict(counters["coda"]) == fired


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype):
    model, x = Block().to(dtype), torch.randn(4, D).to(dtype)
    with torch.no_grad():
        ours, eager = torch.compile(model, backend=coda)(x), model(x)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(ours, eager, **tolerance)
    assert counters["coda"]["rms_norm"] == 1


SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
from test_backend import Block, D
from torch import nn
import coda_inductor
from coda_inductor.backend import coda

if "full disk" in sys.argv:
    def fuse_gemms(graph, policy):
        raise OSError("No space left on device")

    coda_inductor.joint.fuse_gemms = fuse_gemms
found = {}
for how in sys.argv[2].split():
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    reports = len(coda_inductor.reports())
    model, x = Block(), torch.randn(4, D)
    with torch.set_grad_enabled(how == "train"):
        ours = torch.compile(model, backend=coda, options=json.loads(sys.argv[1]))(x)
        torch.testing.assert_close(ours, model(x))
        if how == "train":
            ours.sum().backward()
    hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
    analysed = len(coda_inductor.reports()) - reports
    found[how] = {"hits": hits, "analysed": analysed, "result": ours.tolist()}
print(json.dumps(found))
"""


def in_a_new_process(
    options: dict, folder: Path, how: str, *faults: str, **environment: str
) -> tuple[dict, str]:
    """What SCRIPT found for each word of `how`, "infer" and "train", and its standard error."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",  # conftest turns both off
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        **environment,
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps(options), how, *faults]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_second_process_takes_the_graph_from_torchs_cache(tmp_path):
    found, log = in_a_new_process({}, tmp_path, "infer", TORCH_LOGS="coda_inductor")
    first = found["infer"]
    assert (first["hits"], first["analysed"]) == ([0, 0], 1)
    assert "GEMMs: legal, runs as plain ops here (device cpu has no kernels)" in log
    assert "no GEMM becomes a kernel here" in log
    found, log = in_a_new_process({}, tmp_path, "infer", TORCH_LOGS="coda_inductor")
    second = found["infer"]
    assert (second["hits"], second["analysed"]) == ([1, 1], 0)
    assert second["result"] == first["result"]
    assert "from torch's compile cache" in log
    assert "GEMMs" not in log
    assert "no GEMM becomes a kernel here" in log  # a warm cache hides nothing
    options = {"disable": ["swiglu"]}
    found, log = in_a_new_process(options, tmp_path, "infer", TORCH_LOGS="+coda_inductor")
    third = found["infer"]
    assert (third["hits"], third["analysed"]) == ([0, 0], 1)  # another option is another graph
    assert "raise: rms_norm at" in log
    assert "raise: swiglu at" not in log
    assert "fuse: o reference" in log


def test_what_failed_once_is_not_kept_in_torchs_cache(tmp_path):
    """Neither an inference graph nor a training graph."""
    first, log = in_a_new_process({}, tmp_path, "infer train", "full disk")
    assert log.count("No space left on device") >= 2
    for hit in (False, True):
        found, log = in_a_new_process({}, tmp_path, "infer train")
        assert "No space left" not in log
        assert found.keys() == first.keys() == {"infer", "train"}
        for how, run in found.items():
            assert (run["hits"][1], run["analysed"]) == (int(hit), int(not hit))
            had = torch.tensor(first[how]["result"])
            torch.testing.assert_close(torch.tensor(run["result"]), had)


class LayerNormBlock(nn.Module):
    """LayerNorm, biases everywhere, gate and up in one weight."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.o, self.gate_up, self.down = nn.Linear(D, D), nn.Linear(D, 48), nn.Linear(24, D)

    def forward(self, x):
        x = x + self.o(self.n1(x).cumsum(1))
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def test_layer_norm_and_a_packed_gate_train():
    """In float64: LayerNorms of float32 models are left alone."""
    model, x = LayerNormBlock().double(), torch.randn(2, 5, D, dtype=torch.float64)
    results = []
    for call in (torch.compile(model, backend=coda, options={"strict": True}), model):
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        out = call(inputs)
        out.square().sum().backward()
        results.append([out.detach(), inputs.grad, *(p.grad for p in model.parameters())])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert counters["coda"]["layer_norm_backward"] == counters["coda"]["swiglu_backward"] == 1
