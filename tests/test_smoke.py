# SPDX-License-Identifier: Apache-2.0
"""Does it work here? README's program and a prompt, through Inductor, on a GPU with kernels:
``make smoke`` begins with them."""

import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import coda_inductor

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
PROGRAM = re.search(r"^## Use\n\n```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def llama():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=128, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DEVICE, DTYPE), torch.randint(128, (2, 64), device=DEVICE)


def assert_close(have, want):
    bound = 3e-2 if DEVICE == "cuda" else 1e-4
    torch.testing.assert_close(have, want, rtol=bound, atol=bound)


def test_the_readmes_program_trains_as_eager_does(monkeypatch, capsys):
    ours, tokens = llama()
    eager = copy.deepcopy(ours)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: ours)
    program = PROGRAM if DEVICE == "cuda" else PROGRAM.replace(".cuda()", "")
    coda_inductor.report.forget()
    names = {"name": "a Llama", "tokens": tokens}
    exec(program, names)  # noqa: S102 (it is our page)
    assert " GEMMs " in capsys.readouterr().out
    loss = eager(tokens, labels=tokens).loss
    loss.backward()
    assert_close(names["loss"], loss)
    for have, want in zip(ours.parameters(), eager.parameters(), strict=True):
        assert_close(have.grad, want.grad)


@pytest.mark.gpu
def test_a_prompt_has_eagers_logits():
    """On kernels, which do not pay at this size."""
    model, tokens = llama()
    coda_inductor.report.forget()
    compiled = torch.compile(model, backend="coda", options={"gate": "always"})
    with torch.no_grad():
        assert_close(compiled(tokens).logits, model(tokens).logits)
    (report,) = coda_inductor.reports()
    assert any(site.fused for site in report.sites)
