# SPDX-License-Identifier: Apache-2.0
"""Mixtures of Transformers, unmodified and tiny: the experts of a layer are found and fused in both
directions, and training it gives eager's numbers."""

import functools

import pytest
import torch
from harness import Harness
from passes import codes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import coda_inductor

#: What any of them may call its sizes; each takes those that it knows.
SIZES = (
    {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    | {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    | dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
    | dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "decoder_sparse_step"), 1)
    | dict.fromkeys(("first_k_dense_replace", "pad_token_id"), 0)
    | {"q_lora_rank": 32, "kv_lora_rank": 32, "shared_expert_intermediate_size": 64}
    | {"num_experts_per_tok": 2, "mlp_only_layers": [], "bos_token_id": 1, "eos_token_id": 2}
    | {"input_jitter_noise": 0.0, "router_jitter_noise": 0.0}
)


def made(family, experts, **sizes):
    kind, sizes = CONFIG_MAPPING[family], SIZES | sizes
    config = kind(**{name: size for name, size in sizes.items() if name in kind().to_dict()})
    how = {"attn_implementation": "eager" if family == "gpt_oss" else "sdpa"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=experts, **how)
    model = model.to(torch.bfloat16).train()  # what torch's grouped product takes
    return model, torch.randint(3, 128, (2, 32))


def block_of(model):
    """The first module that has experts: with its router and shared ones."""
    for module in model.modules():
        if any(type(child).__name__.endswith("Experts") for child in module.children()):
            return module
    raise AssertionError("no experts")


#: One a kind of block; other families have the text of one of these. PhiMoE's router sends a token
#: elsewhere if 16 bits are rounded otherwise. Compiled in float32, transformers multiplies by an op
#: of its own, to whose result gpt-oss adds biases in place.
CASES = [(name, torch.bfloat16) for name in ("qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3")]
CASES += [("granitemoe", torch.bfloat16), ("phimoe", torch.float32), ("gpt_oss", torch.float32)]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_a_mixture(family, dtype):
    block, x = block_of(made(family, "grouped_mm")[0]).to(dtype), torch.randn(2, 32, 64).to(dtype)
    harness, found, tolerance = Harness(), [], 2e-2 if dtype == torch.bfloat16 else 1e-5
    for call in (functools.partial(harness.train, block), block):
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y = y[0] if isinstance(y, tuple) else y
        y.float().square().sum().backward()
        grads = [leaf.grad, *(p.grad for p in block.parameters() if p.grad is not None)]
        found.append([t.detach().double() for t in (y, *grads)])
    assert harness.counts["experts"] == harness.counts["experts_backward"] == 1
    assert "experts-loop" not in codes(harness)
    noise = 1e-6 * max(t.norm() for t in found[1])  # a router's gradient may be nothing but that
    for ours, eagers in zip(*found, strict=True):
        assert (ours - eagers).norm() <= tolerance * eagers.norm() + noise
    if family == "gpt_oss":  # gate, up (with biases) and activation are stored, no product
        site = next(s for s in harness.fused if s.program.alternating)
        assert site.patterns == ("experts", "clamped_swiglu")
        assert [o.kind for o in site.program.operands] == ["groups", "index", "row", "row"]
        assert len(site.program.stores) == 3


def test_a_loop_over_experts_is_named():
    """All layers share its graph."""
    model, ids = made(
        "mixtral", "eager", num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1
    )
    with torch.no_grad():
        found = coda_inductor.explain(model, input_ids=ids, use_cache=False)
    (loop,) = next(of for why, of in found.advised.items() if why.startswith("experts-loop"))
    assert loop.what == "experts"
