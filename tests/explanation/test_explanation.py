# SPDX-License-Identifier: Apache-2.0
"""What an explanation says: sites, bytes, saved tensors, near misses and their remedies, also on a
page. It leaves no trace: not in the model, not in torch, not in what is compiled already."""

import html
import re

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from harness import Harness, Stock
from torch import nn
from torch._dynamo.utils import counters
from zoo.layers import VOCABULARY, Decoder, Gated, Mlp

import coda_inductor
from coda_inductor import ExplainError, OptionError, explain

X, TOKENS = torch.ones(32, 64, dtype=torch.bfloat16), torch.arange(64).view(1, 64)


def llama(trains, dtype=torch.bfloat16):
    """A Llama and the explanation of it with the gate open."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(**sizes, **heads, num_hidden_layers=1)
    model, labels = hf.LlamaForCausalLM(config).to(dtype), {"labels": TOKENS} if trains else {}
    with torch.set_grad_enabled(trains):
        how = {"options": {"gate": "always"}, "use_cache": False}
        return model, explain(model, TOKENS, **how, **labels)


def residual():
    """32 x 64 -> 256 -> 64: sizes that are easy to count bytes of."""
    return Mlp(64, 256).bfloat16()


def test_llama_is_explained_as_it_is_compiled():
    (model, found), harness = llama(trains=False), Harness(gate="always")
    harness.run(lambda ids: model(ids, use_cache=False).logits, TOKENS)
    ours = [(s.site.split("layers")[-1], s.patterns, s.absorbed) for s in found.sites]
    compiled = harness.report.sites
    assert ours == [(s.site.split("layers")[-1], s.patterns, s.absorbed) for s in compiled]
    assert {s.how for s in found.fused} == {"kernel"}  # of the GPU that is meant
    assert found.gemms == 7 + 1  # q, k, v, o, gate, up, down; the head
    assert found.gemms_fused == found.gemms - 1  # v


def test_bytes_of_a_site_are_what_its_kernels_read_and_write():
    reports = len(coda_inductor.reports())
    with torch.no_grad():
        found = explain(residual(), X, options={"gate": "always"})
    up, down = found.sites
    # A 32 x 64, B 64 x 256, product 32 x 256; the activation reads the product and writes another
    assert up.bytes_before == 2 * (32 * 64 + 64 * 256 + 3 * 32 * 256)
    assert up.bytes_after == 2 * (32 * 64 + 64 * 256 + 32 * 256)
    # A 32 x 256, B 256 x 64, product, its second reading, residual and sum 32 x 64 each
    assert down.bytes_before == 2 * (32 * 256 + 256 * 64 + 4 * 32 * 64)
    assert down.bytes_after == 2 * (32 * 256 + 256 * 64 + 2 * 32 * 64)
    assert found.bytes_before == up.bytes_before + down.bytes_before
    assert found.bytes_after == up.bytes_after + down.bytes_after
    assert len(found.fused) == 2
    assert not counters["coda"]
    assert len(coda_inductor.reports()) == reports


def test_saved_tensors_are_those_of_the_partitioner():
    model, x = Gated(64, 256, norm=nn.Identity, residual=False).bfloat16(), X
    found = explain(model, x, options={"gate": "always"})
    stock, ours = Stock(), Harness(gate="always")
    stock.train(model, x)
    ours.train(model, x)
    assert found.training
    assert found.saved_bytes_before == stock.saved_bytes() == 3 * 32 * 256 * 2
    assert found.saved_bytes_after == ours.saved_bytes() == 2 * 32 * 256 * 2


def test_what_is_shown_is_what_would_run_on_the_gpu_that_is_named():
    """With its own measurements: the sites of a Llama 1B are in the tables of both."""
    model = nn.Sequential(nn.Linear(2048, 8192, bias=False), nn.GELU(), nn.Linear(8192, 2048))
    model, x = model.bfloat16(), torch.empty(8192, 2048, dtype=torch.bfloat16)
    with torch.no_grad():
        one, other = (explain(model, x, gpu=gpu).sites[0].estimate for gpu in ("h100", "h200"))
    assert one.fused_us != other.fused_us
    with torch.no_grad():
        no_kernel = explain(residual().float(), X.float(), options={"gate": "always"})
        assert not no_kernel.fused
        assert not explain(residual(), X).fused  # the host is the limit
        kernels = explain(residual(), X, gpu="H200", options={"gate": "always"})
        with pytest.raises(OptionError, match=r"'h20' \(did you mean 'h200'\?\)"):
            explain(residual(), X, gpu="h20")
    assert (kernels.gpu, [s.how for s in kernels.sites]) == ("an H200", ["kernel", "kernel"])


def test_on_meta_is_as_on_a_cpu():
    """It said "0 B -> 22 GB kept for backward": torch has no gradient of a loss on meta, and its
    attention keeps all scores. The second graph changes a result of the first one in place."""
    said = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, ids = Decoder(1).bfloat16(), torch.arange(64).view(1, 64)

            def call(ids, model=model):
                logits = model(ids)
                torch._dynamo.graph_break()
                logits.mul_(torch.ones(VOCABULARY, device=logits.device))
                return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

            found = explain(call, ids, options={"gate": "always"})
        assert found.device == device
        said[device] = str(found).replace(f"on {device}", "")
    assert len(found.notes) == 2
    assert 0 < found.saved_bytes_after < found.saved_bytes_before
    assert said["cpu"] == said["meta"]


def test_a_share_of_memory_is_planned_and_a_peak_is_not(warned):
    """Explain said of both that another partitioner was set."""
    notes = explain(residual(), X, options={"gate": "always", "memory": 0.4}).notes
    assert any(note.startswith("Memory: it keeps ") for note in notes)
    assert not warned()
    explain(residual(), X, options={"gate": "always", "memory": "1 GiB"})
    assert len(warned()) == 1


def test_a_page_fetches_nothing_and_escapes_names(tmp_path):
    """It is one file, which notebooks frame; what it links to is there, every row and program."""
    model = nn.ModuleDict({"<b>&": nn.Linear(16, 16), "x": nn.ReLU()}).bfloat16()
    with torch.no_grad():
        how = {"options": {"gate": "always"}}
        found = explain(lambda x: model["x"](model["<b>&"](x)), X[:8, :16], **how)
    page = found.save(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>&" not in page
    assert html.unescape(re.search(r' srcdoc="([^"]*)"', found._repr_html_())[1]) == page
    _, training = llama(trains=True, dtype=torch.float16)
    assert training.gemms == 3 * 8
    assert all(group[0].remedy.text in str(training) for group in training.advised.values())
    for each, text in ((found, page), (training, training.html())):
        assert not re.search(r"""(?:src|href)=["'](?!#)|url\(|@import|//[a-z]+\.""", text)
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert len({*ids}) == len(ids)
        assert {*re.findall(r'href="#([^"]+)"', text)} <= {*ids}
        seen = html.unescape(re.sub(r"<[^>]*>", "", text))
        assert all(row.name in seen for row in each.rows)
        assert all(s.program is None or f"p-{s.program.key}" in ids for s in each.sites)


@pytest.mark.parametrize("name", ["*", "fuse"])
def test_what_is_disabled_is_not_fused(name):
    """Everything was an unknown name; without the pass that fuses there was "no GEMM"."""
    found = explain(residual(), X, options={"gate": "always", "disable": [name]})
    assert {site.reason for site in found.sites} == {f"options['disable'] names {name!r}"}
    roles = [site.role for site in found.sites]
    assert [roles.count(r) for r in ("forward", "input gradient", "weight gradient")] == [2, 1, 2]


class Counting(nn.Module):
    """Counts its calls, breaks its graph, and normalizes with running statistics."""

    def __init__(self, counts=True):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(32)
        self.calls, self.counts = 0, counts

    def forward(self, x):
        if self.counts:
            self.calls += 1
        h = self.norm(self.first(x)).relu()
        torch._dynamo.graph_break()
        return self.second(nn.functional.dropout(h, training=self.training))


def test_a_broken_model_is_explained_as_a_whole_and_stays_as_it_is():
    """And so does the random state."""
    model = Counting().train()
    model.first.weight.grad = torch.ones(32, 16)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    weights, state = list(model.parameters()), torch.get_rng_state()
    found = explain(model, torch.randn(8, 16))
    assert len(found.notes) == 2
    assert len(found.sites) == 5  # two forward; one weight's gradient each, one input's
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randn(8, 16)  # the argument above was drawn by the test
    assert torch.equal(after, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.calls == 0
    assert model.training
    assert all(p is q for p, q in zip(model.parameters(), weights, strict=True))
    assert torch.equal(model.first.weight.grad, torch.ones(32, 16))
    assert model.second.weight.grad is None


def test_what_is_compiled_stays_and_what_is_explained_makes_no_size_dynamic():
    shapes = []

    def backend(gm, inputs):
        shapes.append([x.shape if isinstance(x, torch.Tensor) else "symbol" for x in inputs])
        return gm.forward

    model = Counting(counts=False).eval()
    run = torch.compile(model, backend=backend)
    run(torch.randn(8, 16))
    for rows in (8, 24):
        assert explain(model, torch.randn(rows, 16)).sites[0].shape == (rows, 32, 16)
    run(torch.randn(8, 16))
    assert len(shapes) == 2
    torch.compile(nn.Linear(16, 32), backend=backend)(torch.randn(40, 16))
    assert (40, 16) in shapes[2]
    assert "symbol" not in shapes[2]


@pytest.mark.parametrize(("model", "says"), [
    (lambda x: 3, "no graph"),
    (lambda x: x @ torch.randn(3, 3), "cannot be traced"),
    ("llama", "takes a module or a function, got str"),
])  # fmt: skip
def test_bad_models_are_clear_errors(model, says):
    with pytest.raises(ExplainError, match=says):
        explain(model, torch.randn(8, 16))
