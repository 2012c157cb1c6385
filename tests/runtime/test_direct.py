# SPDX-License-Identifier: Apache-2.0
"""Generated code calls the op's implementation, in the process that made it and in others."""

from pathlib import Path

import torch
from processes import python
from programs import inputs, kinds
from torch._inductor.utils import run_and_get_code

from coda_inductor.runtime import direct, op
from coda_inductor.runtime.op import gemm_epilogue
from coda_inductor.select.config import Config
from coda_inductor.semantic.fp8_casts import AMAX, CAST

HERE = Path(__file__).parent
PROGRAM = kinds()["rms_partial"]
TEXT, CONFIG = PROGRAM.to_json(), str(Config(128, 160, 2, 1, True))
CALL = "torch.ops.coda_inductor.gemm_epilogue.default.direct("


def call(as_, bs, operands):
    return op.OP(as_, bs, operands, TEXT, CONFIG, "site", False)


def casts(x):
    rows, _ = AMAX(x, None, True, False)
    return CAST(x, None, rows.amax(1, keepdim=True), torch.float8_e4m3fn, None, None)[0]


def test_inductor_calls_each_op_without_the_dispatcher_at_any_row_count():
    direct.install()
    run = torch.compile(lambda *t: (call(*t), casts(t[0][0])), fullgraph=True, dynamic=True)
    _, (code,) = run_and_get_code(run, *inputs(PROGRAM, 40, 64, 64))
    for name in ("gemm_epilogue", "fp8_cast", "fp8_amax"):
        assert code.count(f"torch.ops.coda_inductor.{name}.default.direct(") == 1
    for m in (40, 300):
        tensors = inputs(PROGRAM, m, 64, 64)
        got, cast = run(*tensors)
        want = gemm_epilogue(*tensors, PROGRAM, CONFIG)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert torch.equal(cast.view(torch.uint8), casts(tensors[0][0]).view(torch.uint8))


SCRIPT = """
import sys
import torch
import torch._inductor.compile_fx
sys.path.insert(0, sys.argv[1])
import test_direct as t
from apart import apart
from torch._dynamo.utils import counters
from coda_inductor.runtime import direct

def process(first):
    if first:
        direct.install()
    tensors = t.inputs(t.PROGRAM, 40, 64, 64)
    got = torch.compile(t.call, fullgraph=True)(*tensors)
    torch.testing.assert_close(got, t.gemm_epilogue(*tensors, t.PROGRAM, t.CONFIG), rtol=0, atol=0)
    print("hits", counters["inductor"]["fxgraph_cache_hit"])

for first in (True, False):
    apart(process, first)
"""


def test_generated_code_out_of_the_cache_runs_in_another_process(tmp_path):
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    done = python("-c", SCRIPT, HERE, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), **caches)
    assert done.stdout.split("\n") == ["hits 0", "hits 1", ""]
    code = [p.read_text() for p in tmp_path.rglob("*.py")]
    assert any(CALL in text for text in code)
