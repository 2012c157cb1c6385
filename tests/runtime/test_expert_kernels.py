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


@pytest.mark.parametrize("later", [True, False])
def test_gradients_of_weights_are_compiled_beside_the_others(monkeypatch, later):
    asked = []
    leave_custom_ops(monkeypatch)
    monkeypatch.setattr(on_cuda, "_takes", lambda *_: True)
    name = "submit" if later else "wait"
    monkeypatch.setattr(lower.pool, name, lambda found: asked.extend(found) or dict.fromkeys(found))
    harness = Harness()
    harness.record.later = later
    harness.train(Block(up=two_weights), *given())
    gradients = [r for r in asked if r.program.startswith(NAME)]
    assert [r.variant for r in gradients] == ["", "turned", "turned"]
    assert {r.program for r in gradients} == {f"{NAME} float64"}
    assert len(asked) > len(gradients)


@pytest.mark.parametrize("strict", [True, False])
def test_one_that_does_not_compile_stays(monkeypatch, strict):
    """It falls back by itself."""
    leave_custom_ops(monkeypatch)
    monkeypatch.setattr(on_cuda, "_takes", lambda *_: True)
    error = {True: "ptxas said no", False: None}
    monkeypatch.setattr(
        lower.pool, "wait", lambda found: {r: error[r.program.startswith(NAME)] for r in found}
    )
    harness = Harness(strict=strict)
    if strict:
        with pytest.raises(Exception, match="ptxas said no"):
            harness.train(Block(), *given())
        return
    harness.train(Block(), *given())
    assert harness.ops()[str(WGRAD)] == 2
    assert not harness.record.failed


def tensors(k=64, n=(64, 4096), dtype=torch.bfloat16, device="cuda"):
    with FakeTensorMode():
        a = torch.empty(5, k, dtype=dtype, device=device)
        rows = torch.empty(9, dtype=torch.int32, device=device)
        return a, rows, [torch.empty(9, size, dtype=dtype, device=device) for size in n]


def test_what_has_a_kernel(monkeypatch):
    monkeypatch.setattr(availability, "kernel_stack", lambda _: None)
    a, rows, bs = tensors()
    found = on_cuda.requests(a, rows, bs, turned=True)
    assert [(r.program, r.config, r.variant) for r in found] == [
        (f"{NAME} bfloat16", "few", "turned"),
        (f"{NAME} bfloat16", "many", "turned"),
    ]
    assert not on_cuda.requests(a, None, bs, turned=True)
    for other in ({"k": 60}, {"n": (64, 60)}, {"dtype": torch.float32}, {"device": "cpu"}):
        assert not on_cuda.requests(*tensors(**other), turned=True)
    for where, name, other in (
        (on_cuda, "arch_of", BLACKWELL),
        (availability, "kernel_stack", "no GPU"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, lambda _, other=other: other)
            assert not on_cuda.requests(a, rows, bs, turned=True)


def test_it_compiles_where_its_launch_looks_for_it(tmp_path, monkeypatch):
    pytest.importorskip("quack")
    import quack.cache

    from coda_inductor.mainloop import mod  # noqa: F401 (sets the folder on import)

    monkeypatch.setattr(quack.cache, "CACHE_DIR", str(tmp_path))
    asked = [
        pool.KernelRequest(f"{NAME} bfloat16", how, "m", "n", turned)
        for how, turned in (("few", "turned"), ("many", ""))
    ]
    try:
        assert pool.wait(asked, timeout=300) == dict.fromkeys(asked)
    finally:
        pool.shutdown()
    assert all(map(pool.is_ready, asked))
    assert len(list(tmp_path.rglob("*.o"))) == 2
