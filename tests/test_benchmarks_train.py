# SPDX-License-Identifier: Apache-2.0
"""The training suites measure and render, at a size for CPUs.

The suites run once through the real command line, with graphs op by op (those in
``test_benchmarks`` are Inductor's); what needs a GPU or Liger there is tested with stand-ins.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch
from benchmark_runs import HAND_LAYER, benchmarks

from benchmarks import (
    blocks,
    ceiling,
    gradients,
    kernels,
    layer,
    layer_train,
    measure,
    model_train,
    models,
    plots,
    report,
    train_tables,
)
from benchmarks.runner import Job

SUITES = ["layer_train", "model_train", "kernels"]
pytestmark = pytest.mark.timeout(900)  # the first test waits for all suites

TINY = (
    f"--suite {','.join(SUITES)} --sizes tiny --rows 32 --models tiny --train-tokens 16 --rounds 2 "
    "--optimizer --without rms_norm --skip max_autotune,compile_checkpoint --timeout 900 "
    "--blocks residual_norm,norm_rotary"
)
LAYERS = "o_proj norm1 gate_proj up_proj down_proj norm2 q_proj k_proj v_proj"
# Embedding (tied), then a layer of attention, MLP and two norms, and the last norm.
TINY_WEIGHTS = 256 * 64 + 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64 + 64
LIGER = "pip install liger-kernel"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One run of the training suites."""
    out = tmp_path_factory.mktemp("benchmarks_train") / "out"
    done = benchmarks("--out", str(out), *TINY.split(), forking=True, op_by_op=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((out / "results.json").read_text())
    assert list(results) == ["environment", *SUITES]
    assert done.stdout.endswith(report.short(results) + "\n")
    return results


def measured(result: dict, *names: str) -> None:
    """All of `names`, and nothing else, has medians."""
    assert list(result["variants"]) == list(names)
    for variant in result["variants"].values():
        assert len(variant["samples_ms"]) == 2
        assert 0 < variant["p20_ms"] <= variant["median_ms"] <= variant["p80_ms"]


def test_layer_train_times_steps_and_names_what_was_skipped(results):
    result = results["layer_train"]["tiny"]
    measured(result, "eager", "gemms", "gemms_fused", "compile", "coda")
    assert result["errors"] == {"max_autotune": "left out by --skip"}
    assert result["shape"] == {"M": 32, "d": 64, "f": 128, "kv": 32, "norm": "hf"}
    assert list(result["profile"]) == ["coda", "compile"]
    products = [k for k in result["profile"]["compile"]["kernels"] if k["name"] == "aten::mm"]
    assert sum(kernel["calls"] for kernel in products) > 14  # of 21; the first may be addmm


def test_layer_train_has_the_error_of_every_gradient(results):
    accuracy = results["layer_train"]["tiny"]["accuracy"]
    assert list(accuracy) == ["eager", "compile", "coda"]
    for found in accuracy.values():
        assert list(found) == ["x0", "y", *LAYERS.split()]
        assert all(0 < error < 0.05 for error in found.values())


def test_model_train_steps_with_an_optimizer_that_moves_the_weights(results):
    result = results["model_train"]["tiny 16"]
    measured(result, "eager", "compile", "coda", "coda_checkpoint", "coda without rms_norm")
    assert result["errors"].pop("compile_checkpoint") == "left out by --skip"
    assert all("liger" in name and LIGER in why for name, why in result["errors"].items())
    assert len(result["errors"]) == 2
    assert result["shape"]["optimizer"] == "fused AdamW"
    assert result["accuracy"] == {}
    for variant in result["variants"].values():
        # Beside each weight two moments, and beside each tensor a counter of steps.
        assert 3 < variant["model_mib"] * 2**20 / (TINY_WEIGHTS * 2) < 3.01


def test_kernels_time_each_block_forward_and_as_a_step(results):
    assert list(results["kernels"]) == ["residual_norm tiny", "norm_rotary tiny"]
    for result in results["kernels"].values():
        names = ("eager", "gemms", "compile", "coda")
        assert set(result["variants"]) == {*names, *(name + kernels.STEP for name in names)}
        assert set(result["errors"]) == {"liger", "liger" + kernels.STEP}
        assert all(LIGER in why for why in result["errors"].values())
        for variant in result["variants"].values():
            assert variant["median_ms"] > 0


def test_kernels_have_the_errors_of_outputs_and_gradients(results):
    result = results["kernels"]["residual_norm tiny"]
    tensors = ["x", "normed", "gradient of residual", "gradient of y"]
    tensors += ["gradient of o_proj", "gradient of norm"]
    assert list(result["accuracy"]) == ["eager", "compile", "coda"]
    for found in result["accuracy"].values():
        assert list(found) == tensors
        assert all(0 < error < 0.05 for error in found.values())


def test_llama_gradients_are_compared_with_fp32(tmp_path):
    left_out = (
        "compile",
        "coda",
        "liger",
        "liger_compile",
        "compile_checkpoint",
        "coda_checkpoint",
    )
    variants = measure.Variants(tmp_path / "progress", dict.fromkeys(left_out, "not needed"))
    result = model_train.run(Job("model_train", "tiny", 16, rounds=1), variants)
    found = result["accuracy"]["eager"]
    assert 0 < found["all gradients"] <= found["worst parameter"] < 0.1
    assert result["worst_parameter"]["eager"].startswith("model.")
    assert result["loss"]["eager"] == pytest.approx(result["loss"]["exact"], rel=0.01)
    assert result["variants"]["eager"]["model_mib"] == TINY_WEIGHTS * 2 / 2**20


def test_the_reference_in_chunks_of_rows_is_that_of_all_rows(monkeypatch):
    block, x0, y = layer.build("tiny", 32, "hf")
    block, inputs = block.float(), [x0.float().requires_grad_(), y.float().requires_grad_()]
    given = layer_train.tangents(block, inputs[0])
    outputs, found = gradients.reference(block, inputs, given)
    monkeypatch.setattr(gradients, "REFERENCE_ROWS", 12)
    chunked_outputs, chunked = gradients.reference(block, inputs, given)
    step = gradients.step(block, inputs, block.parameters(), given)()
    for pair in zip((*chunked_outputs, *chunked), (*outputs, *found), strict=True):
        torch.testing.assert_close(*pair)
    for pair in zip(found, step, strict=True):
        torch.testing.assert_close(*pair)


def test_products_are_as_many_as_the_weights_and_three_times_with_gradients(monkeypatch):
    shapes = []
    product = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b: shapes.append((*a.shape, *b.shape)) or product(a, b)
    )
    block, x0, y = layer.build("tiny", 32, "hf")
    layer.gemms(block, x0, y, fused=False)()
    assert len(shapes) == 7
    shapes.clear()
    layer.gemms(block, x0, y, fused=True, backward=True)()
    # q, k, v in one weight: 64 + 32 + 32 columns; forward, gradient of operand and of weight.
    assert len(shapes) == 12
    assert {(32, 64, 64, 128), (32, 128, 128, 64), (128, 32, 32, 64)} <= set(shapes)


def test_the_ceilings_step_gives_the_gradients_of_our_layer(tmp_path):
    path = tmp_path / "hand_layer_train.py"
    path.write_text(HAND_LAYER)
    block, x0, y = layer.build("tiny", 32, "hf")
    block, x0, y = block.cpu().float(), x0.cpu().float(), y.cpu().float()
    given = layer_train.tangents(block, x0)
    values = ceiling.make_step(path, block, x0, y, given)()
    _, truths = gradients.reference(block, [x0, y], given)
    found = gradients.errors(gradients.names(block, layer_train.INPUTS), values, truths)
    assert list(found) == ["x0", "y", *LAYERS.split()]
    assert all(error < 1e-5 for error in found.values()), found


def fake_liger() -> ModuleType:
    """Liger's operators with its signatures in plain torch; SwiGLU overwrites what it saved."""
    ops = ModuleType("liger_kernel.ops")

    def rms_norm(x, weight, eps, offset, casts, in_place):
        assert (offset, casts, type(in_place)) == (0.0, "llama", bool)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    def add_rms_norm(x, residual, weight, eps, offset, casts, in_place):
        assert not in_place
        total = x + residual
        return rms_norm(total, weight, eps, offset, casts, in_place), total

    class SiLUMul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.saved = gate, up
            return torch.nn.functional.silu(gate) * up

        @staticmethod
        def backward(ctx, gradient):
            gate, up = ctx.saved
            sigmoid = gate.float().sigmoid()
            d_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
            d_up = gradient * gate * sigmoid
            return gate.data.copy_(d_gate), up.data.copy_(d_up)

    def rope(q, k, cos, sin):
        """In place, and so is its gradient; q and k are (B, H, T, D), the tables (1, T, D)."""
        return Turn.apply(q, cos, sin), Turn.apply(k, cos, sin)

    class Turn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cos, sin):
            ctx.tables = cos, sin
            ctx.mark_dirty(x)
            return x.copy_(x * cos[:, None] + blocks.rotate_half(x) * sin[:, None])

        @staticmethod
        def backward(ctx, gradient):
            cos, sin = ctx.tables
            back = gradient * cos[:, None] - blocks.rotate_half(gradient * sin[:, None])
            return gradient.data.copy_(back), None, None

    functions = {"RMSNorm": rms_norm, "FusedAddRMSNorm": add_rms_norm, "Rope": rope}
    for name, apply in functions.items():
        setattr(ops, f"Liger{name}Function", type(name, (), {"apply": staticmethod(apply)}))
    ops.LigerSiLUMulFunction = SiLUMul
    return ops


@pytest.mark.parametrize("block", list(blocks.BLOCKS))
def test_ligers_blocks_are_ours_even_where_they_overwrite_their_inputs(
    monkeypatch, tmp_path, block
):
    package = ModuleType("liger_kernel")
    package.ops = fake_liger()
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    left_out = {name + end: "not needed" for name in ("compile", "coda") for end in ("", "_train")}
    variants = measure.Variants(tmp_path / "progress", left_out)
    result = kernels.run(Job("kernels", "tiny", 32, rounds=2, block=block), variants)
    assert set(result["errors"]) == set(left_out)
    assert result["accuracy"]["liger"].keys() == result["accuracy"]["eager"].keys()
    assert all(0 < error < 0.02 for error in result["accuracy"]["liger"].values())


def test_report_renders_all_training_suites(results, tmp_path):
    """Also where they come from runs of their own."""
    sources = []
    for suite in SUITES:
        sources.append(tmp_path / f"{suite}.json")
        one = {name: results[name] for name in ("environment", suite)}
        sources[-1].write_text(json.dumps(one))
    paths = [plots.write(sources, tmp_path / name) for name in ("one", "two")]
    names = ["layer_train", "kernels", "model_train"]
    images = [f"benchmarks_{name}.svg" for name in names]
    assert [path.name for path in paths[0]] == ["benchmarks.md", *images]
    assert [p.read_text() for p in paths[0]] == [p.read_text() for p in paths[1]]
    page = paths[0][0].read_text()
    for suite in names:
        for result in results[suite].values():
            assert f"{result['variants']['coda']['median_ms']:.3f}" in page
        assert f"({f'benchmarks_{suite}.svg'})" in page


def canned(times: dict[str, float], **fields) -> dict:
    """A result with these medians."""
    variants = {
        name: {"median_ms": time, "host_us": 9.0, "peak_mib": 1024 * time, "model_mib": 512.0}
        for name, time in times.items()
    }
    return {"variants": variants, "errors": {}, "profile": {}, "accuracy": {}, **fields}


def cells(table: str) -> list[list[str]]:
    """The cells of a table's rows, without heading and rule."""
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_a_layers_speedup_is_over_the_better_mode_of_torch_compile():
    times = {"eager": 4.0, "compile": 3.0, "max_autotune": 2.5, "coda": 2.0, "gemms": 1.9}
    shape = {"M": 8, "d": 4, "f": 8, "kv": 2, "norm": "hf"}
    results = {"layer_train": {"1B": canned(times, shape=shape)}}
    text = report.short(results)
    assert "21 GEMMs (cuBLAS)" in text
    assert text.splitlines()[3].split()[-1] == "1.250"
    assert cells(train_tables.layer_memory(results)) == [
        ["1B", "4096", "3072", "2560", "2048", "-"]
    ]


def test_a_models_memory_is_told_with_and_without_its_weights():
    times = {"compile": 3.0, "coda": 2.0, "compile_checkpoint": 4.5, "coda_checkpoint": 3.0}
    times |= {"liger": 3.5, "liger_compile": 3.2}
    results = {"model_train": {"1B 2048": canned(times, shape={"num_hidden_layers": 10})}}
    assert cells(train_tables.step_memory(results)) == [
        ["1B 2048", "in all", "-", "4.00", "3.70", "3.50", "2.50", "5.00", "3.50"],
        ["1B 2048", "beyond the model", "-", "3.50", "3.20", "3.00", "2.00", "4.50", "3.00"],
    ]
    assert cells(train_tables.step_times(results))[0][-3:] == ["1.500", "1.600", "1.500"]
    assert cells(train_tables.step_parts(results)) == []


def test_what_a_pattern_is_worth_is_ours_with_and_without_it():
    results = {
        "model_train": {"1B 2048": canned({"compile": 3.0, "coda": 2.0, "coda without x": 2.5})}
    }
    assert cells(train_tables.step_parts(results)) == [
        ["1B 2048", "coda", "2.000", "2.00"],
        ["1B 2048", "coda without x", "2.500", "2.50"],
    ]


@pytest.fixture
def small_models(monkeypatch):
    """The models themselves, with their sizes cut down."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    monkeypatch.setattr(models, "LLAMAS", dict.fromkeys(models.LLAMAS, small))
    monkeypatch.setattr(models, "GPT2", models.GPT2 | {"n_embd": 64, "n_layer": 1, "n_head": 4})
    cut = {name: small[name] for name in models.VIT}
    monkeypatch.setattr(models, "VIT", cut)
    monkeypatch.setattr(models, "IMAGES", 2)
    small |= {"head_dim": 16, "d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    for other, (kind, each, shape) in models.OTHERS.items():
        cut = shape | {field: value for field, value in small.items() if field in shape}
        monkeypatch.setitem(models.OTHERS, other, (kind, each, cut))


@pytest.mark.usefixtures("small_models")
@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_has_a_loss_that_trains(name):
    model, batch, _ = models.build(name, 16)
    trained = model_train.Trained(model, batch)
    loss, found = trained.gradients()
    assert loss > 0
    assert all(gradient is not None for gradient in found.values())


@pytest.mark.usefixtures("small_models")
def test_a_gradient_that_is_zero_but_for_rounding_is_not_the_worst_parameter():
    """A key's bias adds the same to all scores of a query: its gradient is zero."""
    model, batch, _ = models.build("bert", 16)
    _, found = model_train.Trained(model.float(), batch).gradients()
    assert found["bert.encoder.layer.0.attention.self.key.bias"].norm() < 1e-6
    result = {}
    trained = {"eager": model_train.Trained(model.bfloat16(), batch)}
    accuracy = model_train._accuracy(model, batch, trained, result)["eager"]
    assert 0 < accuracy["worst parameter"] < 0.5
    assert "key.bias" not in result["worst_parameter"]["eager"]


def test_a_blocks_table_is_of_its_forward_or_of_its_step():
    times = {"compile": 3.0, "coda": 2.0, "compile_train": 9.0, "coda_train": 6.0}
    times |= {"liger_train": 7.5}
    accuracy = {"compile": {"x": 1e-3, "gradient of y": 4e-3}, "coda": {"x": 2e-3}}
    part = canned(times, shape={"d": 2048}, accuracy=accuracy)
    results = {"kernels": {"norm_swiglu 1B": part}}
    place = ["RMSNorm, 2 GEMMs, SwiGLU", "2048"]
    forward, step = (cells(train_tables.kernel_times(results, end)) for end in ("", kernels.STEP))
    assert forward == [[*place, "-", "-", "3.000", "2.000", "-", "1.500", "-"]]
    assert step == [[*place, "-", "7.500", "9.000", "6.000", "-", "1.500", "1.250"]]
    worst = cells(train_tables.kernel_errors(results))
    assert worst == [[*place, "4.00e-03", "2.00e-03", "2.000"]]
