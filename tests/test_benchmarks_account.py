# SPDX-License-Identifier: Apache-2.0
"""The account of a step: kinds, bytes and makers, from a trace as the profiler writes it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import account


def launch(identity, name, shapes, types):
    given = {"External id": identity, "Input Dims": shapes, "Input type": types}
    return {"cat": "cpu_op", "name": name, "args": given}


def kernel(identity, name, us, **given):
    return {"cat": "kernel", "name": name, "dur": us, "args": {"External id": identity, **given}}


FUSED = "triton_poi_fused_mul_3"
TRACE = [
    {"cat": "python_function", "name": "step"},
    launch(1, "aten::mm", [[64, 32], [32, 16]], ["c10::BFloat16", "c10::BFloat16"]),
    kernel(1, "nvjet_tst_128x256_64x4", 40.0),
    launch(2, FUSED, [[64, 16], [64, 16], [], [16]], ["c10::BFloat16", "float", "Scalar", "int"]),
    kernel(2, FUSED, 6.0),
    launch(3, FUSED, [[64, 16], [64, 16], [], [16]], ["c10::BFloat16", "float", "Scalar", "int"]),
    kernel(3, FUSED, 8.0),
    kernel(4, "kernel_cutlass_kernel_quackepiloguefrontendGemmMod_coda_1", 100.0),
    kernel(5, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 50.0),
    kernel(6, "ncclDevKernel_AllGather_RING_LL", 9.0),
    kernel(7, "_cast_kernel", 5.0),
    kernel(8, "void at::native::vectorized_elementwise_kernel<4>", 2.0),
    {
        "cat": "gpu_memcpy",
        "name": "Memcpy DtoD",
        "dur": 1.0,
        "args": {"bytes": 512, "External id": 1},
    },
]


def test_kinds_makers_and_bytes():
    found = account.read(TRACE, 2)
    fused = found[FUSED]
    assert (fused.kind, fused.maker, fused.us, fused.calls) == (account.REST, "Inductor", 7.0, 1.0)
    assert fused.bytes == 64 * 16 * (2 + 4) + 16 * 4
    assert {name[:6]: k.maker for name, k in found.items() if k.kind == account.REST} == {
        "triton": "Inductor", "_cast_": "coda", "void a": "aten", "Memcpy": "CUDA",
    }  # fmt: skip
    assert found["Memcpy DtoD"].bytes == 256


def test_triton_kernels_of_ours_are_ours():
    """Their names, as the profiler has them."""
    mainloop = account.environment.REPOSITORY / "coda_inductor/mainloop"
    named = [line for path in mainloop.glob("*.py") for line in path.read_text().splitlines()
             if line.startswith("def _") and line.endswith("_kernel(")]  # fmt: skip
    assert len(named) >= 4
    for line in named:
        name = line.removeprefix("def ").removesuffix("(")
        assert account.of_name(account.MAKERS, name, "library") == "coda", name


def test_shares_are_of_all():
    found = account.shares(account.read(TRACE, 2), 1.5)
    wanted = {
        "collectives": 4.5, "attention": 25.0, "GEMMs": 70.0, "rest": 11.0, "idle": 1.5, "all": 112,
    }  # fmt: skip
    assert found == pytest.approx({kind: us / 1e3 for kind, us in wanted.items()})


def test_idle_is_when_no_stream_has_a_kernel():
    times = [("kernel", 10, 5), ("kernel", 12, 10), ("gpu_memcpy", 30, 2), ("kernel", 33, 1)]
    events = [{"cat": cat, "ts": ts, "dur": dur} for cat, ts, dur in times]
    assert account.idle_us([{"cat": "cpu_op", "ts": 0, "dur": 90}, *events], 2) == (8 + 1) / 2
    assert account.idle_us([], 2) == 0


def test_small_kernels_are_one_line():
    text = account.text(account.read(TRACE, 1), 0.0, bytes_per_us=1000.0)
    assert FUSED in text
    assert "_cast_kernel" not in text
    assert "3 shorter ones" in text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--models", "7B"], "no such model: 7B"),
        (["--variants", "eager"], "no such variant: eager"),
        (["--variants", "coda_options"], "no such variant: coda_options"),
        (["--options", "[1]"], "'[1]' is no JSON object"),
        (["--models", "1B", "--variants", "coda_options", "--options", '{"gate": "always"}'],
         "there is no GPU"),
        (["--models", "1B"], "there is no GPU"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(arguments, what, capsys, monkeypatch):
    monkeypatch.setattr(account, "device", lambda: "cpu")
    with pytest.raises(SystemExit):
        account.main(arguments)
    assert what in capsys.readouterr().err


def test_what_was_measured_before_the_time_is_over_is_kept(tmp_path, monkeypatch):
    kernels = account.read(TRACE, 1)
    runs = iter([(kernels, 1.0)])

    def profiled(_call):
        if (run := next(runs, None)) is None:
            raise KeyboardInterrupt
        return run

    monkeypatch.setattr(account, "device", lambda: "cuda")
    monkeypatch.setattr(account, "gpu_of", lambda _device: SimpleNamespace(bytes_per_us=1e3))
    monkeypatch.setattr(account.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(account, "step", lambda *_how: lambda: None)
    monkeypatch.setattr(account, "profiled", profiled)
    out = tmp_path / "account.json"
    with pytest.raises(KeyboardInterrupt):
        account.main(["--models", "1B", "--variants", "coda,compile", "--out", str(out)])
    found = json.loads(out.read_text())["account"]
    assert list(found) == ["1B-8192-coda"]
    assert set(found["1B-8192-coda"]["kernels"]) == set(kernels)
