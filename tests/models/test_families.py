"""Model families that nobody wrote a template for: each is fused and agrees with eager."""

import functools

import pytest
import torch
import transformers as hf
from harness import Harness

COMMON = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
PLAIN = {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}
OPT = {
    "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 128, "word_embed_proj_dim": 64,
}  # fmt: skip
LLAMA_LIKE = {"rms_norm": 4, "swiglu": 2, "residual": 4}  # 2 L norms, L gates, 2 L residuals

# family: (model, config, what must fire in 2 layers)
FAMILIES = {
    "Qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**COMMON, head_dim=16), LLAMA_LIKE),
    "Mistral": (hf.MistralForCausalLM, hf.MistralConfig(**COMMON), LLAMA_LIKE),
    "Granite": (hf.GraniteForCausalLM, hf.GraniteConfig(**COMMON), LLAMA_LIKE),
    "Phi-3": (hf.Phi3ForCausalLM, hf.Phi3Config(**COMMON, pad_token_id=0), {"rms_norm": 4}),
    "OLMo 2": (hf.Olmo2ForCausalLM, hf.Olmo2Config(**COMMON), {"swiglu": 2}),
    "Mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**COMMON), {"residual": 2}),
    "StarCoder 2": (hf.Starcoder2ForCausalLM, hf.Starcoder2Config(**COMMON), {"residual": 4}),
    "Gemma 2": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**COMMON, head_dim=16), {"epilogue": 2}),
    "GPT-2": (hf.GPT2LMHeadModel, hf.GPT2Config(**GPT2), {"residual": 4, "epilogue": 2}),
    "GPT-NeoX": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**PLAIN), {"epilogue": 2}),
    "OPT": (hf.OPTForCausalLM, hf.OPTConfig(**OPT), {"residual": 4}),
    "BERT": (hf.BertForMaskedLM, hf.BertConfig(**PLAIN), {"residual": 4, "epilogue": 2}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_fires_and_agrees(family):
    make, config, least = FAMILIES[family]
    model = make(config).eval()
    tokens = torch.randint(0, 128, (2, 16))
    extra = {} if family == "BERT" else {"use_cache": False}

    def logits(ids):
        return model(ids, **extra).logits

    harness = Harness()
    ours = harness.run(logits, tokens)
    with torch.no_grad():
        eager = logits(tokens)
    assert (ours - eager).norm() / eager.norm() < 1e-5
    fired = {name: harness.counts[name] for name in least}
    assert all(fired[name] >= least[name] for name in least), harness.counts


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains(family):
    make, config, least = FAMILIES[family]
    model = make(config).eval()  # no dropout, so that eager draws the same numbers: none
    tokens = torch.randint(0, 128, (2, 16))
    extra = {} if family == "BERT" else {"use_cache": False}
    weights = torch.randn(128)

    def loss(ids):
        return (model(ids, **extra).logits * weights).square().mean()

    harness, found = Harness(), []
    for call in (functools.partial(harness.train, loss), loss):
        model.zero_grad()
        call(tokens).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1])
    for ours, eager in zip(*found, strict=True):
        assert (ours - eager).norm() <= 1e-4 * eager.norm() + 1e-7
    assert all(harness.counts[name] >= times for name, times in least.items()), harness.counts
    for name in {"rms_norm", "swiglu"} & least.keys():
        assert harness.counts[f"{name}_backward"] >= least[name]


def test_vit_and_t5_agree():
    vit = hf.ViTConfig(**PLAIN, image_size=32, patch_size=8)
    model = hf.ViTForImageClassification(vit).eval()
    image, harness = torch.randn(2, 3, 32, 32), Harness()
    ours = harness.run(lambda x: model(x).logits, image)
    torch.testing.assert_close(ours, model(image).logits)
    assert harness.counts["residual"] == 4

    t5 = hf.T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=128)
    t5.decoder_start_token_id = 0
    encoder_decoder = hf.T5ForConditionalGeneration(t5).eval()
    tokens, harness = torch.randint(0, 128, (2, 16)), Harness()

    def logits(ids):
        return encoder_decoder(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits

    ours = harness.run(logits, tokens)
    torch.testing.assert_close(ours, logits(tokens), rtol=1e-4, atol=1e-4)
    assert harness.counts["rms_norm"] == 9
