# SPDX-License-Identifier: Apache-2.0
"""The callback trains what Trainer trains without it, says once what was fused, and leaves a model
like any other. ``distributed/trainer_ranks.py`` has it on two ranks."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from coda_inductor import log

pytest.importorskip("accelerate")

from zoo.trained import LAYERS, STEPS, llama, losses, trainer

from coda_inductor.transformers import CodaCallback, free_inputs, without_masks


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch, without_code):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    counters.clear()
    log.forget_warnings()


def test_it_trains_as_without(caplog):
    peft = pytest.importorskip("peft")
    found, caches = [], []
    watch = transformers.TrainerCallback()
    watch.on_step_end = lambda *_, model, **__: caches.append(model.config.use_cache)
    for callbacks in ([], [CodaCallback(), watch]):
        config = peft.LoraConfig(r=4, target_modules="all-linear")
        made = trainer(
            peft.get_peft_model(llama(), config), callbacks, gradient_accumulation_steps=2
        )
        made.model.config.use_cache = True
        made.train()
        found.append((losses(made), made.model.state_dict()))
    (want, plain), (have, ours) = found
    assert len(have) == STEPS
    torch.testing.assert_close(have, want, rtol=0, atol=1e-4)
    assert list(ours) == list(plain)
    assert ({*caches}, made.model.config.use_cache) == ({False}, True)
    assert len([text for text in caplog.messages if "1 graph(s)" in text]) == 1
    fired = Counter(counters["coda"])
    assert fired["rms_norm"] == fired["rms_norm_backward"] == 2 * LAYERS
    made.train()  # it is compiled
    assert fired == Counter(counters["coda"])


def test_checkpoints_turned_on_in_each_step_compile_once():
    """TRL's trainers for DPO and GRPO do that, and each time an embedding gets one more hook."""
    peft = pytest.importorskip("peft")
    found = []
    again = transformers.TrainerCallback()

    def turn_on(*_, model, **__):
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable()

    again.on_step_end = turn_on
    for callbacks in ([again], [CodaCallback(), again]):
        model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules="all-linear"))
        made = trainer(model, callbacks, gradient_checkpointing=True)
        made.train()
        found.append(losses(made))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    model.enable_input_require_grads()
    hidden = model.get_input_embeddings()(torch.tensor([1]))
    assert hidden.requires_grad


def test_without_the_embeddings_hook_a_loop_with_checkpoints_is_one_graph():
    """As docs/frameworks.md says; with the hook there are three."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules="all-linear"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    model.compile(backend="coda")
    tokens = torch.randint(16, (2, 8))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("reentrant", [None, True])
def test_a_hook_that_is_needed_stays(reentrant):
    """By reentrant checkpoints, or by the user, where there are no checkpoints of transformers."""
    model = llama()
    model.enable_input_require_grads()
    if reentrant:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    undo = free_inputs(model)
    assert model.get_input_embeddings()(torch.tensor([1])).requires_grad
    model.get_input_embeddings().weight.requires_grad_(False)
    assert model.get_input_embeddings()(torch.tensor([1])).requires_grad
    undo()


@pytest.mark.parametrize("by", ["in place", "a part", "wrapper", "trainer"])
def test_a_compiled_model_stays(by, caplog):
    model = llama()
    part = {"in place": model, "a part": model.model.layers[0]}.get(by)
    if part is not None:
        part.compile(backend="eager")
    model = torch.compile(model, backend="eager") if by == "wrapper" else model
    trainer(llama())  # sets accelerate's state
    args = SimpleNamespace(use_cache=False, torch_compile=by == "trainer")
    callback = CodaCallback()
    callback.on_train_begin(args, None, None, model=model)
    assert callback.compiled is None
    assert ["compiled already" in text for text in caplog.messages].count(True) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_each_config_of_a_model_loses_its_cache_unless_asked_for(asked):
    model = trainer(llama()).model
    model.config, model.model.config = (SimpleNamespace(use_cache=True) for _ in range(2))
    callback, args = CodaCallback(), SimpleNamespace(use_cache=asked, torch_compile=False)
    for _ in range(2):  # Trainer begins again where a batch did not fit
        callback.on_train_begin(args, None, None, model=model)
        assert model.config.use_cache is model.model.config.use_cache is asked
    callback.on_train_end(args, None, None)
    assert model.config.use_cache is model.model.config.use_cache is True


def looked_at(model):
    """A call of ``model`` that notes whether its mask reaches it, and the notes."""
    seen = []

    def call(**inputs):
        seen.append(inputs["attention_mask"] is not None)

    return without_masks(model, call, True), seen


@pytest.mark.parametrize("other", [0, 2])
def test_a_mask_reaches_the_model_where_it_or_a_position_says_more(other):
    """And in each call behind the first with padding, or documents' numbers: two graphs do."""
    call, seen = looked_at(llama())
    tokens, ones, padded = (torch.ones(2, 4, dtype=torch.long) for _ in range(3))
    padded[0, 3] = other
    call(input_ids=tokens, attention_mask=ones)
    call(input_ids=tokens, attention_mask=ones, position_ids=tokens)  # packed documents
    call(input_ids=tokens, attention_mask=ones, past_key_values=())
    call(input_ids=tokens[:, 3:], attention_mask=ones)  # of a cache
    torch.compile(call, backend="eager", fullgraph=True)(input_ids=tokens, attention_mask=ones)
    call(input_ids=tokens, attention_mask=ones)
    call(input_ids=tokens, attention_mask=padded)
    call(input_ids=tokens, attention_mask=ones)
    assert seen == [False, True, True, True, True, False, True, True]


@pytest.mark.parametrize(
    "why", ["", "its label", "its place", "documents", "another tensor", "no labels", "evaluation",
            "experts", "an encoder", "no causal model"],
)  # fmt: skip
def test_a_mask_stays_unless_nobody_sees_what_it_hides(why, monkeypatch):
    """Padding is behind all tokens, and has no label: a later call still leaves its mask out, one
    of evaluation or training too, where the other needed it."""
    model = llama()
    model.config.output_router_logits = why == "experts"
    model.config.is_causal = why != "no causal model"
    if why == "an encoder":  # its file has one, which may get this mask
        file = transformers.models.llama.modeling_llama
        monkeypatch.setattr(file, "create_bidirectional_mask", None, raising=False)
    call, seen = looked_at(model)
    tokens, mask = (torch.ones(2, 4, dtype=torch.long) for _ in range(2))
    mask[0, 1 if why == "its place" else slice(2, None)] = 2 if why == "documents" else 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 3] = 1 if why == "its label" else labels[0, 3]
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    inputs |= {"token_type_ids": tokens} if why == "another tensor" else {}
    model.train(why != "evaluation")
    call(**inputs | {"labels": None if why == "no labels" else labels})
    model.train(why == "evaluation")
    call(**inputs | {"attention_mask": torch.ones_like(mask)})
    assert seen == [bool(why), False]


@pytest.mark.parametrize("asked", [True, False])
def test_batches_are_causal_until_padding_has_labels(asked):
    """Their mask is an input of the graph, which Trainer passes on."""
    found = []
    for callbacks in ([], [CodaCallback()]):
        made = trainer(llama(), callbacks)
        for number, row in enumerate(made.train_dataset):
            row["attention_mask"] = torch.ones_like(row["input_ids"])
            row["attention_mask"][12:] -= int(number == 0)  # not in the first step
            row["labels"] = row["labels"].masked_fill(row["attention_mask"] + asked == 0, -100)
        made.train()
        found.append((losses(made), dict(made.model.named_parameters())))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
    assert counters["coda"]["constant_mask"] == LAYERS
    assert counters["stats"]["unique_graphs"] == 1 + asked


@pytest.mark.parametrize(("rows", "how", "graphs"), [
    ([9, 12], {}, 1), ([9, 9], {}, 2), ([12, 12], {}, 2), ([9, 12], {"dynamic": False}, 3)
])  # fmt: skip
def test_batches_padded_to_their_longest_row_have_one_graph(rows, how, graphs):
    """Others are compiled for the first length, and again for any."""
    model, step = llama(), lambda input_ids, **_: -input_ids
    model.compile = lambda backend, **how: vars(model).update(
        _compiled_call_impl=torch.compile(step, backend="eager", **how)
    )
    trainer(llama())  # sets accelerate's state
    args = SimpleNamespace(use_cache=False, torch_compile=False)
    CodaCallback(**how).on_train_begin(args, None, None, model=model)
    for more in (0, 2, 5):
        tokens = torch.ones(2, 12 + more, dtype=torch.long)
        mask = (torch.arange(12 + more) < torch.tensor(rows)[:, None] + more).long()
        labels = tokens.masked_fill(mask == 0, -100)
        model(input_ids=tokens, attention_mask=mask, labels=labels)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("name", ["Llama", "XLM"])
def test_a_model_that_would_make_a_mask_from_its_tokens_keeps_its_mask(name):
    sizes = {"emb_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": 64}
    xlm = transformers.XLMWithLMHeadModel(transformers.XLMConfig(**sizes))
    model, seen = {"Llama": llama(), "XLM": xlm}[name], []
    calls = {"_compiled_call_impl": lambda **inputs: seen.append(inputs["attention_mask"])}
    model.compile = lambda **_: vars(model).update(calls)
    trainer(llama())  # sets accelerate's state
    args = SimpleNamespace(use_cache=False, torch_compile=False)
    CodaCallback().on_train_begin(args, None, None, model=model)
    tokens = torch.full((1, 4), 2)
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert [mask is not None for mask in seen] == [name == "XLM"]
