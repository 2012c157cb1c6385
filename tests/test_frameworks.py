# SPDX-License-Identifier: Apache-2.0
"""docs/frameworks.md, internals/exported.md and loop.md, word for word: each block runs
with a small Llama, and trains or computes as without us. So do recipes that are one sentence there.

Inductor's generated code is swapped for eager execution of the graphs: what is tested is that our
passes are reached, and that frameworks take what they return.
"""

import copy
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
SAID = {
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator()
model.compile(backend="coda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
""",
    "generate_static": """
from transformers import CompileConfig

how = {"cache_implementation": "static", "compile_config": CompileConfig(backend="coda")}
output = model.generate(tokens, max_new_tokens=8, do_sample=False, **how)
""",
    "accelerate_regions": """
from accelerate.utils import compile_regions

model.config.use_cache = False  # else each layer has a graph of its own
model = compile_regions(model, backend="coda")
loss = model(**batch).loss
loss.backward()
""",
    "trl": """
from coda_inductor.transformers import CodaCallback
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model,
    args=SFTConfig("out", max_steps=3, report_to="none"),
    train_dataset=texts,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    callbacks=[CodaCallback()],
)
trainer.train()
""",
    "lightning": """
import pytorch_lightning as pl


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
        self.model.compile(backend="coda")

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = pl.Trainer(max_steps=3, accelerator="auto", logger=False, enable_checkpointing=False)
trainer.fit(Module(), loader)
""",
    "torchao": """
from torchao.quantization import Int8WeightOnlyConfig, quantize_
quantize_(model, Int8WeightOnlyConfig())
model.compile(backend="coda")
with torch.no_grad():
    logits = model(tokens).logits
""",
}  # fmt: skip
ALL = BLOCKS | SAID
ROWS, LENGTH, WORDS = 8, 16, 64
#: Layers where one graph serves all of them, or each has its own; elsewhere there is one.
SEVERAL = 2
#: What fires in a model of one layer, forward and backward.
NORMS, GATES = 2, 1


class Dataset(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(2, WORDS, (ROWS, LENGTH), generator=torch.Generator())

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


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
    dataset = Dataset()
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    config = transformers.LlamaConfig(**sizes, **heads, **special)
    return {
        "torch": torch, "model": transformers.LlamaForCausalLM(config),
        "dataset": dataset, "loader": loader, "batch": next(iter(loader)),
        "tokens": dataset.rows[:2, :5],
    }  # fmt: skip


def run(name, text=None, layers=1, **more):
    """The namespace after a block, and what has fired."""
    torch._dynamo.reset()
    counters.clear()
    names = {**given(layers), **more}
    torch.manual_seed(1)
    exec(compile(ALL[name] if text is None else text, name, "exec"), names)  # noqa: S102
    return names, Counter(counters["coda"])


def plain(name):
    """The block as somebody would write it without us."""
    lines = [
        line for line in ALL[name].splitlines() if not re.search(r"\.compile\(b|\.enable\(", line)
    ]
    return re.sub(r"callbacks=\[CodaCallback\(\)\]", "", "\n".join(lines))


def on_cpu(text):
    """Where a framework does not read that from the environment."""
    text = text.replace('accelerator="auto"', 'accelerator="cpu"')
    return re.sub(r'SFTConfig\("out"', 'SFTConfig("out", use_cpu=True, bf16=False', text)


def same(ours, eager, tolerance=1e-3):
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


def weights(names):
    """Of the model, or of the one that a trainer has made."""
    model = names["trainer"].model if "tokenizer" in names else names["model"]
    return {name: p.detach() for name, p in model.named_parameters()}


def gradients(names):
    return {n: p.grad for n, p in names["model"].named_parameters() if p.grad is not None}


def zero(names):
    """Parameters that DeepSpeed shards."""
    get = names["deepspeed"].utils.safe_get_full_fp32_param
    return [get(p) for p in names["model"].parameters()]


TRAINED = {"rms_norm": NORMS, "swiglu": GATES, "rms_norm_backward": NORMS, "swiglu_backward": GATES}
#: One graph serves all blocks.
SHARED = {"rms_norm": 1, "swiglu": 1, "swiglu_backward": 1}
#: Block -> what it needs, the block that runs without us as it does, what fires, what is compared.
BLOCKS_THAT_TRAIN = {
    "trainer": ("accelerate", "trainer", {**TRAINED, "cross_entropy": 1}, weights),
    "accelerate": ("accelerate", "accelerate", TRAINED, weights),
    "lightning": ("pytorch_lightning", "lightning", TRAINED, weights),
    "peft": ("peft", "peft", TRAINED, gradients),
    "deepspeed": ("deepspeed", "deepspeed", SHARED, zero),
    "trl": ("trl", "trl", {}, weights),
    "loop": ("torch", "loop", {**TRAINED, "cross_entropy": 1}, weights),
    "blocks": ("torch", "blocks", {**SHARED, "cross_entropy": 0}, gradients),
    "blocks_and_loss": ("torch", "blocks_and_loss", {**SHARED, "cross_entropy": 1}, gradients),
    "torchao": (
        "torchao.quantization", "torchao", {"rms_norm": NORMS, "swiglu": GATES},
        lambda names: names["logits"],
    ),
}  # fmt: skip
IN_BLOCKS = ("deepspeed", "blocks", "blocks_and_loss")


def test_every_block_is_run():
    text = Path(__file__).read_text()
    ran = {name for name in ALL if re.search(rf"""run\(\s*"{name}[",]""", text)}
    assert {*ran, *BLOCKS_THAT_TRAIN, *GENERATES} == {*ALL}
    assert PAGE.count("```python") == len(BLOCKS)


def given_to(name, monkeypatch):
    """What else a block is given."""
    if name == "deepspeed":
        linear = torch.nn.functional.linear  # DeepSpeed replaces it for good
        monkeypatch.setattr(torch.nn.functional, "linear", linear)
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        for key, value in {**alone, "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}.items():
            monkeypatch.setenv(key, value)
        adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        how = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
        return {"settings": {**how, "optimizer": adam}}
    if name == "trl":
        from datasets import Dataset as Table

        rows = [" ".join(f"t{word}" for word in row.tolist()) for row in Dataset().rows]
        return {"texts": Table.from_dict({"text": rows}), "tokenizer": word_tokenizer()}
    return {}


@pytest.mark.usefixtures("settings_of_inductors")
@pytest.mark.parametrize("name", BLOCKS_THAT_TRAIN)
def test_it_trains_as_without_us(name, monkeypatch):
    needed, without, fires, compared = BLOCKS_THAT_TRAIN[name]
    pytest.importorskip(needed)
    more = {"layers": SEVERAL if name in IN_BLOCKS else 1, **given_to(name, monkeypatch)}
    ours, fired = run(name, on_cpu(ALL[name]), **more)
    coda_inductor.disable()
    text = plain(without).replace("for block", "# ") if name == "deepspeed" else plain(without)
    text = ALL[name].replace('"coda"', '"eager"') if name.startswith("blocks") else text
    eager, _ = run(name, on_cpu(text), **more)
    assert {n: fired[n] for n in fires} == fires
    assert fired["rms_norm"]
    same(compared(ours), compared(eager))
    if name == "trainer":
        assert ours["trainer"].state.global_step == 3
        saved = ours["trainer"].model.state_dict()
        assert list(saved) == list(eager["model"].state_dict())
    if name == "peft":
        assert len(gradients(ours)) == 2 * 7


def test_what_the_page_says_of_copies_names_and_caches():
    model, batch = given()["model"], given()["batch"]
    names = list(model.state_dict())
    model.compile(backend="coda")
    assert list(model.state_dict()) == names
    copy.deepcopy(model)(**batch)
    model.forward(**batch)
    wrapper = torch.compile(given()["model"], backend="coda")
    wrapper.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
    assert not counters["coda"]
    model(**batch)
    assert counters["coda"]["swiglu"] == GATES
    wrapper = torch.compile(model, backend="coda")
    assert all(name.startswith("_orig_mod.") for name in wrapper.state_dict())


#: Block -> norms that fire at least.
GENERATES = {"generate": NORMS, "generate_static": 1}


@pytest.mark.parametrize("name", GENERATES)
def test_generate(name, monkeypatch):
    from transformers import CompileConfig

    monkeypatch.setattr(CompileConfig, "_compile_all_devices", True)  # else on GPUs only
    ours, fired = run(name)
    eager = given()
    want = eager["model"].generate(eager["tokens"], max_new_tokens=8, do_sample=False)
    assert torch.equal(ours["output"], want)
    assert fired["rms_norm"] >= GENERATES[name]
    assert fired["swiglu"] >= GATES


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {"pad_token": "t0", "eos_token": "t1", "bos_token": "t2", "unk_token": "t3"}
    numbers = {f"t{i}": i for i in range(WORDS)}
    words = Tokenizer(models.WordLevel(numbers, unk_token=names["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


@pytest.fixture
def settings_of_inductors():
    """Are put back: torchao's ``quantize_`` changes them for good."""
    kept = torch._inductor.config.get_config_copy()
    yield
    torch._inductor.config.load_config(kept)


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


def test_regions_of_accelerates():
    pytest.importorskip("accelerate")
    ours, fired = run("accelerate_regions", layers=SEVERAL)
    same(ours["loss"], (want := given(SEVERAL))["model"](**want["batch"]).loss, 1e-5)
    assert fired["swiglu"] == fired["swiglu_backward"] == 1
