# SPDX-License-Identifier: Apache-2.0
"""``python -m coda_inductor explain``: targets, options, exit codes."""

import pytest

from coda_inductor.__main__ import main

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


def test_a_folder_of_a_hugging_face_model_needs_no_weights(tmp_path, capsys):
    settings = [word for size in SIZES for word in ("--set", size)]
    how = ["--tokens", "64", "--option", "gate=always", "--gpu", "h200"]
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert main(["explain", "--hf", str(tmp_path), *settings, *how]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM on cpu: 14 of 15 GEMMs absorb" in printed
    assert "64 x 64 x 64" in printed


@pytest.mark.parametrize(("arguments", "says"), [
    (["explain"], "name either"),
    (["explain", "nowhere.py:make"], "no such file"),
    (["explain", "make"], "does not name a function"),
    (["explain", "TARGET:absent"], "has no function 'absent'"),
    (["explain", "TARGET:wrong"], "must return (model, args)"),
    (["explain", "TARGET:make", "--option", "gate"], "write KEY=VALUE"),
    (["explain", "TARGET:make", "--option", "patterns=no.py"], "no such file 'no.py'"),
    (["explain", "--hf", "llamma"], "no such model_type (did you mean 'llama' or "),
    (["explain", "--hf", "llama", "--set", "hidden=3"], "LlamaConfig has no such value"),
    (["explain", "--hf", "llama", "--set", "hidden_size=big"], "expected int, got str"),
    (["explain", "TARGET:make", "--set", "a=1"], "--set is for --hf models"),
    (["explain", "TARGET:make", "--out", "nowhere/page.html"], "folder does not exist"),
    (["explain", "TARGET:make", "--gpu", "h300"], "did you mean 'h200' or 'h100'?"),
    (["explain", "TARGET:make", "--gpu", "a100"], "no kernels run on a GPU 'a100'"),
])  # fmt: skip
def test_wrong_usage_is_a_message_and_exit_code_2(target, arguments, says, capsys):
    assert main([word.replace("TARGET", target) for word in arguments]) == 2
    assert says in capsys.readouterr().err


def test_an_encoder_has_its_own_head_and_a_batch_that_counts(capsys):
    """BERT once got a causal head, whose warning broke the graph: it ran, with indices that nobody
    had set. Its 512 tokens alone were too few for any kernel."""
    sizes = [word for size in SIZES[:-1] for word in ("--set", size)]
    command = ["explain", "--hf", "bert", *sizes, "--set", "max_position_embeddings=64"]
    assert main([*command, "--gpu", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "BertForMaskedLM on cpu: " in printed
    assert "2048 x 64 x 64" in printed
