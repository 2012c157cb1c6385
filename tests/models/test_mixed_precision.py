# SPDX-License-Identifier: Apache-2.0
"""float32 weights under bfloat16 autocast: what fuses there and not with bfloat16 weights, and what
it does to the gradients."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from harness import Harness
from torch import nn

from coda_inductor.explanation.capture import capture
from coda_inductor.mainloop import availability
from coda_inductor.options import parse

CUDA = torch.device("cuda", 0)
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 128,
}  # fmt: skip


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def llama(layers, dtype=torch.float32):
    """The reports of a training step on an H100 that fuses whatever is legal, of a Llama whose
    weights are of ``dtype``."""
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_hidden_layers=layers)).to(dtype)
    ids, settings = torch.zeros(2, 32, dtype=torch.long), parse(None, {"gate": "always"})

    def loss():
        logits = model(ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(availability, "kernel_stack", lambda *_: None)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            ((found,), _) = capture(loss, (), {}, settings, device=CUDA)
    return found.report.sites


def fused(sites, role):
    return [site for site in sites if site.how == "kernel" and site.role == role]


def test_all_weight_gradients_of_a_llama_leave_in_float32():
    """The rest fuses as with bfloat16 weights."""
    layers = 1
    sites, half = llama(layers), llama(layers, torch.bfloat16)
    weights = fused(sites, "weight gradient")
    assert len(weights) == 7 * layers + 1
    for site in weights:
        assert [(s.value, s.dtype) for s in site.program.stores] == [("acc", "float32")]
    # The first layer's norm has no GEMM in front, so that its v has nothing to absorb.
    assert len(fused(sites, "forward")) == 6 * layers
    # Attention's gradients are read head by head, but for the sum of q, k and v.
    assert len(fused(sites, "input gradient")) == 3 * layers + 1
    assert not fused(half, "weight gradient")
    for role in ("forward", "input gradient"):
        names = [site.site for site in fused(sites, role)]
        assert names == [site.site for site in fused(half, role)]


def test_a_weight_gradient_leaves_unrounded():
    """With the kernels' numerics: eager rounds it to bfloat16 and widens that."""
    linear, x = nn.Linear(16, 24, bias=False), torch.randn(40, 16)
    with autocast():
        result = Harness(reference=True).train(lambda x: F.linear(x, linear.weight).float(), x)
        result.square().sum().backward()
    dz, half = 2 * result.detach(), x.bfloat16().double()
    exact = dz.bfloat16().double().t() @ half
    error = (linear.weight.grad - exact).norm() / exact.norm()
    assert error < 1e-6
    assert (exact.bfloat16() - exact).norm() / exact.norm() > 1e-3


@pytest.mark.parametrize("rows", [33, 40])
def test_rows_that_suit_no_kernel_are_no_failure(rows, monkeypatch):
    """K of a weight's gradient is the number of rows: a failure would be a warning, and an error
    with ``strict``."""
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    linear = nn.Linear(16, 24, bias=False)
    settings = parse(None, {"gate": "always"})
    with autocast():
        ((found,), _) = capture(linear, (torch.randn(rows, 16),), {}, settings, device=CUDA)
    (site,) = [s for s in found.report.sites if s.role == "weight gradient"]
    assert (site.how == "kernel") == (rows % 8 == 0)
    assert site.refusal is None or (site.refusal.code, site.refusal.failure) == (
        "not-multiple-of-8", False
    )  # fmt: skip


def test_a_pair_that_leaves_widened_stays_a_pair():
    """Kernels of pairs store 16 bits, so that the cast stays behind."""

    def function(x, gate, up):
        return (F.silu(F.linear(x, gate)) * F.linear(x, up)).float()

    harness = Harness(reference=True)
    args = [torch.randn(16, 16).bfloat16() for _ in range(3)]
    assert harness.run(function, *args).dtype == torch.float32
    (site,) = harness.fused
    assert site.program.paired
    assert [store.dtype for store in site.program.stores] == ["bfloat16"]
