# SPDX-License-Identifier: Apache-2.0
"""``python -m coda_inductor tune``: what it measures, its table, its complaints."""

import types
from dataclasses import replace

import pytest
import torch
from fake_tuning import Machine, install
from measured import HOPPER, figures, keyed, site

from coda_inductor import plan
from coda_inductor.__main__ import main
from coda_inductor.cli import tune as command
from coda_inductor.lowering import driver
from coda_inductor.mainloop import availability
from coda_inductor.select import measurements
from coda_inductor.select.measurements import FOLDER, Measurements


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache; the store of a GPU model in it."""
    monkeypatch.setenv("CODA_CACHE_DIR", str(tmp_path))
    return Measurements(HOPPER, tmp_path / FOLDER)


def test_a_report_says_what_won_and_by_how_much(cache, capsys):
    """A damaged file or a strange key hides no other."""
    won = figures({"128x128:2x1:pp": 50.0, "128x192:2x1:pp": 40.0}, m=8192, spread=0.012,
                  name="layers.0.mlp.gate_proj + up_proj")  # fmt: skip
    broken = figures({}, failed={"128x128:2x1:pp": "hangs"}, m=8192, name="lm_head")
    cache.add(keyed(site("swiglu", n=8192), won) | keyed(site("logsumexp", n=50304), broken))
    cache.add({"strange": replace(won, name="strange")})
    cache.path.with_name("aaa.json").write_text("{")
    assert main(["tune", "--report"]) == 0
    said = capsys.readouterr().out
    assert f"{cache.path.stem}: 3 sites\n" in said
    rows = {line.split("  ")[0]: line.split() for line in said.splitlines() if "8192x" in line}
    words = {"8192x8192x2048", "128x192:2x1:pp", "40", "100", "2.5", "1.2"}
    assert words <= set(rows["layers.0.mlp.gate_proj + up_proj"])
    assert "none works" in " ".join(rows["lm_head"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_gpu_or_a_model_there_is_a_message(cache, capsys):
    assert [main(["tune", "--hf", "llama"]), main(["tune"])] == [1, 1]
    assert capsys.readouterr().err.count("tune measures on a GPU, but torch sees none") == 2


TINY = ("hidden_size=2048", "intermediate_size=8192", "num_hidden_layers=1", "vocab_size=512",
        "num_attention_heads=16", "num_key_value_heads=4")  # fmt: skip
LLAMA = ["tune", "--hf", "llama", *(word for size in TINY for word in ("--set", size))]


@pytest.fixture
def gpu(cache, monkeypatch):
    """A GPU as far as the command sees: what measures is none."""
    machine = Machine()
    install(monkeypatch, machine)
    cuda = types.SimpleNamespace(is_available=lambda: True, current_device=lambda: 0)
    seen = {"cuda": cuda, "device": torch.device, "set_grad_enabled": torch.set_grad_enabled}
    monkeypatch.setattr(command, "torch", types.SimpleNamespace(**seen))
    monkeypatch.setattr(command, "gpu_of", lambda _: HOPPER)
    monkeypatch.setattr(plan, "gpu_of", lambda _: HOPPER)
    for module in (command, plan):
        monkeypatch.setattr(module, "measurements_of", lambda _: cache)
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    monkeypatch.setattr("coda_inductor.arch._archs", {0: HOPPER.arch})
    return machine


def test_a_model_is_measured_once(gpu, cache, monkeypatch, capsys):
    """Torch's caches hold graphs that were compiled without what is measured now."""
    assert measurements.generation() == ""
    seen, tuner = [], driver.Tuner
    monkeypatch.setattr(driver, "Tuner", lambda *given: seen.append(given[2]) or tuner(*given))
    assert main([*LLAMA, "--tokens", "4096,8192", "--seconds", "70"]) == 0
    assert set(seen) == {70.0}
    assert (first := measurements.generation())
    said = capsys.readouterr().out
    found = cache.user_rows().values()
    assert {row.m for row in found} == {4096, 8192}
    for m in (4096, 8192):
        count = sum(row.m == m for row in found)
        assert count >= 3
        assert f"{m} tokens: {count} sites measured, kept in {cache.path}" in said
    assert gpu.busy == 0
    asked = len(gpu.measured)
    assert main([*LLAMA, "--tokens", "4096"]) == 0
    assert "4096 tokens: 0 sites measured" in capsys.readouterr().out
    assert len(gpu.measured) == asked == len(found)
    assert measurements.generation() == first  # nothing new


def test_what_was_left_is_measured_once(gpu, cache, monkeypatch, capsys):
    monkeypatch.setattr(command, "Tuner", driver.Tuner)
    cache.leave([site(), site("swiglu", n=8192)])
    assert main(["tune"]) == 0
    assert f"2 that were left: 2 sites measured, kept in {cache.path}" in capsys.readouterr().out
    assert measurements.generation()
    assert gpu.busy == 0
    assert main(["tune"]) == 2
    assert "no sites are left to measure" in capsys.readouterr().err
