# SPDX-License-Identifier: Apache-2.0
"""Kernels around a mixture's experts are compiled ahead of their first use."""

import pytest
import torch
from checking import leave_custom_ops
from harness import Harness
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo.experts import Block, given, two_weights

from coda_inductor.arch import BLACKWELL
from coda_inductor.lowering import lower
from coda_inductor.mainloop import availability
from coda_inductor.runtime import on_cuda, pool
from coda_inductor.semantic.experts import WGRAD

NAME = "coda_inductor::grouped_wgrad"


def test_gradients_of_weights_are_compiled_beside_the_others(monkeypatch):
    asked = []
    leave_custom_ops(monkeypatch)
    monkeypatch.setattr(on_cuda, "_takes", lambda *_: True)
    monkeypatch.setattr(lower.pool, "submit", asked.extend)
    harness = Harness()
    harness.record.later = True
    harness.train(Block(up=two_weights), *given())
    gradients = [r for r in asked if r.program == f"{NAME} float64"]
    assert [r.variant for r in gradients] == ["", "turned", "turned"]
    assert len(asked) > len(gradients)


def test_one_that_does_not_compile_stays(monkeypatch):
    """It falls back by itself."""
    leave_custom_ops(monkeypatch)
    monkeypatch.setattr(on_cuda, "_takes", lambda *_: True)
    failed = "ptxas said no"
    monkeypatch.setattr(
        lower.pool, "wait", lambda found: {r: failed if NAME in r.program else None for r in found}
    )
    harness = Harness(strict=False)
    harness.train(Block(), *given())
    assert harness.ops()[str(WGRAD)] == 2


def test_what_has_a_kernel(monkeypatch):
    def requests(k=64, n=64, dtype=torch.bfloat16, device="cuda"):
        with FakeTensorMode():
            a = torch.empty(5, k, dtype=dtype, device=device)
            rows = torch.empty(9, dtype=torch.int32, device=device)
            bs = [torch.empty(9, size, dtype=dtype, device=device) for size in (n, 4096)]
        return [r.config for r in on_cuda.requests(a, rows, bs, turned=True)]

    monkeypatch.setattr(availability, "kernel_stack", lambda _: None)
    assert requests() == ["few", "many"]
    for other in ({"k": 60}, {"n": 60}, {"dtype": torch.float32}, {"device": "cpu"}):
        assert not requests(**other)
    monkeypatch.setattr(on_cuda, "arch_of", lambda _: BLACKWELL)
    assert not requests()


def test_it_compiles_where_its_launch_looks_for_it(tmp_path, monkeypatch):
    pytest.importorskip("quack")
    import quack.cache

    from coda_inductor.mainloop import mod  # noqa: F401 (sets the folder on import)

    monkeypatch.setattr(quack.cache, "CACHE_DIR", str(tmp_path))
    asked = [pool.KernelRequest(f"{NAME} bfloat16", "few", "m", "n", "turned")]
    try:
        assert pool.wait(asked, timeout=300) == dict.fromkeys(asked)
    finally:
        pool.shutdown()
    assert all(map(pool.is_ready, asked))
    assert len(list(tmp_path.rglob("*.o"))) == 1
