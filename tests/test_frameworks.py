# SPDX-License-Identifier: Apache-2.0
"""docs/frameworks.md, internals/exported.md and loop.md, word for word: each block runs
with a small Llama, and trains or computes as without us.

Inductor's generated code is swapped for eager execution of the graphs: what is tested is that our
passes are reached, and that frameworks take what they return.
"""

import functools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from harness import as_it_is
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, config

import coda_inductor

PAGES = ("frameworks", "internals/exported", "loop")
DOCS = Path(__file__).parents[1] / "docs"
PAGE = "".join((DOCS / f"{name}.md").read_text() for name in PAGES)
BLOCKS = dict(re.findall(r"^```python\n# (\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
ROWS, LENGTH, WORDS = 8, 16, 64
#: Layers where one graph serves all of them, or each has its own; elsewhere there is one.
SEVERAL = 2
#: What fires in a model of one layer, forward and backward.
NORMS, GATES = 2, 1


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, without_code):
    """In a folder of its own, on the CPU, without code generation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    light = functools.partial(compile_fx.compile_fx, inner_compile=as_it_is)
    monkeypatch.setattr(compile_fx, "compile_fx", light)
    with config.patch(pre_grad_custom_pass=None, joint_custom_pre_pass=None):
        yield


def given(layers=1):
    """What blocks are given, the same each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    rows = torch.randint(2, WORDS, (ROWS, LENGTH), generator=torch.Generator())
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    config = transformers.LlamaConfig(**sizes, **heads, **special)
    return {
        "torch": torch, "model": transformers.LlamaForCausalLM(config),
        "dataset": dataset, "loader": loader, "batch": next(iter(loader)),
        "tokens": rows[:2, :5],
    }  # fmt: skip


def run(name, text=None, layers=1):
    """The namespace after a block, and what has fired."""
    torch._dynamo.reset()
    counters.clear()
    names = given(layers)
    torch.manual_seed(1)
    exec(compile(BLOCKS[name] if text is None else text, name, "exec"), names)  # noqa: S102
    return names, Counter(counters["coda"])


def plain(name):
    """The block as somebody would write it without us."""
    lines = [
        line
        for line in BLOCKS[name].splitlines()
        if not re.search(r"\.compile\(b|\.enable\(", line)
    ]
    return re.sub(r"callbacks=\[CodaCallback\(\)\]", "", "\n".join(lines))


def same(ours, eager, tolerance=1e-3):
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


def weights(names):
    return {name: p.detach() for name, p in names["model"].named_parameters()}


def gradients(names):
    return {n: p.grad for n, p in names["model"].named_parameters() if p.grad is not None}


TRAINED = {"rms_norm": NORMS, "swiglu": GATES, "rms_norm_backward": NORMS, "swiglu_backward": GATES}
#: One graph serves all blocks.
SHARED = {"rms_norm": 1, "swiglu": 1, "swiglu_backward": 1}
#: Block -> what it needs, what fires, what is compared with the block without us.
BLOCKS_THAT_TRAIN = {
    "trainer": ("accelerate", {**TRAINED, "cross_entropy": 1}, weights),
    "peft": ("peft", TRAINED, gradients),
    "loop": ("torch", {**TRAINED, "cross_entropy": 1}, weights),
    "blocks": ("torch", {**SHARED, "cross_entropy": 0}, gradients),
    "blocks_and_loss": ("torch", {**SHARED, "cross_entropy": 1}, gradients),
}


def test_every_block_is_run():
    by_hand, alone = {"deepspeed"}, {"generate", "export", "inductor"}
    assert {*by_hand, *alone, *BLOCKS_THAT_TRAIN} == {*BLOCKS}
    assert PAGE.count("```python") == len(BLOCKS)


@pytest.mark.parametrize("name", BLOCKS_THAT_TRAIN)
def test_it_trains_as_without_us(name):
    needed, fires, compared = BLOCKS_THAT_TRAIN[name]
    pytest.importorskip(needed)
    layers = SEVERAL if name.startswith("blocks") else 1
    ours, fired = run(name, layers=layers)
    coda_inductor.disable()
    text = BLOCKS[name].replace('"coda"', '"eager"') if layers == SEVERAL else plain(name)
    eager, _ = run(name, text, layers=layers)
    assert {n: fired[n] for n in fires} == fires
    same(compared(ours), compared(eager))
    if name == "trainer":
        assert ours["trainer"].state.global_step == 3
        assert list(weights(ours)) == list(weights(eager))


def test_generate():
    ours, fired = run("generate")
    eager = given()
    want = eager["model"].generate(eager["tokens"], max_new_tokens=8, do_sample=False)
    assert torch.equal(ours["output"], want)
    assert fired["rms_norm"] >= NORMS
    assert fired["swiglu"] >= GATES


def test_export():
    ours, fired = run("export")
    with torch.no_grad():
        same(ours["logits"], ours["model"](ours["tokens"]).logits)
    assert fired["swiglu"] >= GATES
    assert not fired["rms_norm"], "torch asserts the dtypes of its casts"


def test_inductor():
    want = given()
    loss = want["model"](**want["batch"]).loss
    loss.backward()
    ours, fired = run("inductor")
    assert {n: fired[n] for n in TRAINED} == TRAINED
    same(ours["loss"], loss, 1e-5)
    same(gradients(ours), gradients(want), 1e-5)
