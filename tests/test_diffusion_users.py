# SPDX-License-Identifier: Apache-2.0
"""Diffusion transformers as their users run them: compiled block by block, at another resolution,
with adapters that come, are merged and go. Each result is eager's, and compiles as often as under
torch.compile."""

import pytest
import torch
from checking import randn
from harness import Harness, Stock
from torch import nn
from zoo.diffusion import WIDTH, Block, Blocks
from zoo.layers import Lora

D = WIDTH


def attach(model: nn.Module) -> None:
    linears = [(m, n, c) for m in model.modules() for n, c in m.named_children()
               if isinstance(c, nn.Linear) and c.out_features == D]  # fmt: skip
    for parent, name, linear in linears:
        setattr(parent, name, Lora(linear, 4).to(linear.weight))
        nn.init.normal_(getattr(parent, name).b.weight)


def adapters(model: nn.Module) -> list[Lora]:
    return [m for m in model.modules() if isinstance(m, Lora)]


def merge(model: nn.Module) -> None:
    for lora in adapters(model):
        lora.base.weight.data += lora.scale * lora.b.weight @ lora.a.weight
        lora.b.weight.data.zero_()


def nothing(_model: nn.Module) -> None:
    pass


@pytest.mark.parametrize(("regional", "dynamic"), [(False, None), (True, True)])
def test_adapters_and_resolutions(regional, dynamic):
    compiled = {}
    for kind in (Stock, Harness):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, backend = Blocks(Block, 1 + regional).double().eval(), kind()
        how = {"backend": backend, "dynamic": dynamic, "fullgraph": True}
        if regional:
            for block in model.blocks:
                block.compile(**how)
        function = model if regional else torch.compile(model, **how)
        for change in (nothing, attach, merge):
            change(model)
            for tokens in (10, 14, 18) if change is nothing else (14,):
                inputs = randn(2, tokens, D).double(), randn(2, D).double()
                with torch.inference_mode():
                    found = function(*inputs)
                    with torch.compiler.set_stance("force_eager"):
                        want = model(*inputs)
                torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
        compiled[kind] = backend.graphs
        if kind is Harness:
            assert backend.report.sites
    assert compiled[Harness] == compiled[Stock]
