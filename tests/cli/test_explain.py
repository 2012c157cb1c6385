# SPDX-License-Identifier: Apache-2.0
"""``python -m coda_inductor explain``: targets, options, exit codes."""

import os

import pytest

from coda_inductor.__main__ import main

HINT = "--hf is for language models"
SIZES = ("hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "vocab_size=256",
         "num_attention_heads=4", "num_key_value_heads=2")  # fmt: skip
SOURCE = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).bfloat16()
    return model, torch.ones(8, 16, dtype=torch.bfloat16)

def wrong():
    return 3
"""


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "small_model.py"
    path.write_text(SOURCE)
    return str(path)


def test_a_function_of_a_file_is_explained_and_saved(target, tmp_path, capsys):
    """With ``--train`` both passes."""
    page = tmp_path / "page.html"
    command = ["explain", f"{target}:make", "--option", "gate=always", "--out", str(page)]
    for train in ([], ["--train"]):
        assert main([*command, *train]) == 0
        printed = capsys.readouterr().out
        assert "Sequential on cpu: " in printed
        assert ("per training step" in printed) == bool(train)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("local", [False, True], ids=["family", "folder"])
def test_a_hugging_face_model_needs_no_weights(local, tmp_path, capsys):
    settings = [word for size in SIZES for word in ("--set", size)]
    how = ["--tokens", "64", "--option", "gate=always", "--gpu", "h200"]
    if local:
        (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    family = str(tmp_path) if local else "llama"
    assert main(["explain", "--hf", family, *settings, *how]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM on cpu: 14 of 15 GEMMs absorb" in printed
    assert "64 x 64 x 64" in printed


@pytest.mark.parametrize(("arguments", "says"), [
    (["explain"], "name either"),
    (["explain", "nowhere.py:make"], "no such file"),
    (["explain", "no_such_module:make"], "No module named"),
    (["explain", "make"], "does not name a function"),
    (["explain", "TARGET:absent"], "has no function 'absent'"),
    (["explain", "TARGET:wrong"], "must return (model, args)"),
    (["explain", "TARGET:make", "--option", "gate"], "write KEY=VALUE"),
    (["explain", "TARGET:make", "--option", "gat=1"], "unknown option 'gat'"),
    (["explain", "TARGET:make", "--option", "patterns=no.py"], "no such file 'no.py'"),
    (["explain", "--hf", "llamma"], "no such model_type (did you mean 'llama' or "),
    (["explain", "--hf", "meta-llama/Llama-3.1-8B"], "it takes one, as llama, or a folder with"),
    (["explain", "--hf", "llama", "--set", "hidden=3"], "LlamaConfig has no such value"),
    (["explain", "--hf", "llama", "--set", "hidden_size=big"], "expected int, got str"),
    (["explain", "TARGET:make", "--set", "a=1"], "--set is for --hf models"),
    (["explain", "TARGET:make", "--out", "nowhere/page.html"], "folder does not exist"),
    (["explain", "TARGET:make", "--out", "."], "it is a folder"),
    (["explain", "TARGET:make", "--gpu", "h300"], "did you mean 'h200' or 'h100'?"),
    (["explain", "TARGET:make", "--gpu", "a100"], "no kernels run on a GPU 'a100'"),
])  # fmt: skip
def test_wrong_usage_is_a_message_and_exit_code_2(target, arguments, says, capsys):
    """The hint that --hf is for language models was once given with every error of it."""
    assert main([word.replace("TARGET", target) for word in arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert HINT not in said


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [("explain", "tokens", "0"), ("explain", "batch", "two"), ("tune", "tokens", "-1")],
)
def test_sizes_are_positive(command, name, value, capsys):
    with pytest.raises(SystemExit):
        main([command, "--hf", "llama", f"--{name}", value])
    assert f"{value!r} is not a positive number" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_page_that_cannot_be_written_is_a_message(target, capsys):
    assert main(["explain", f"{target}:make", "--out", "/dev/full"]) == 1
    found = capsys.readouterr()
    assert "Sequential on cpu" in found.out
    assert "error: the page cannot be written" in found.err


def test_an_encoder_has_its_own_head_and_a_batch_that_counts(capsys):
    """BERT once got a causal head, whose warning broke the graph: it ran, with indices that nobody
    had set. Its 512 tokens alone were too few for any kernel."""
    sizes = [word for size in SIZES[:-1] for word in ("--set", size)]
    command = ["explain", "--hf", "bert", *sizes, "--set", "max_position_embeddings=64", "--train"]
    assert main([*command, "--gpu", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "BertForMaskedLM on cpu: " in printed
    assert "2048 x 64 x 64" in printed


def test_an_error_of_another_model_has_a_hint(capsys):
    assert main(["explain", "--hf", "vit", "--set", "num_hidden_layers=1"]) == 1
    assert HINT in capsys.readouterr().err
