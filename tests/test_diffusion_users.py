# SPDX-License-Identifier: Apache-2.0
"""A diffusion transformer as its users run it: compiled block by block, at another resolution,
with adapters that come and are merged. Each result is eager's, and compiles as often as under
torch.compile."""

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


def merge(model: nn.Module) -> None:
    for lora in [m for m in model.modules() if isinstance(m, Lora)]:
        lora.base.weight.data += lora.scale * lora.b.weight @ lora.a.weight
        lora.b.weight.data.zero_()


def test_adapters_and_resolutions():
    compiled = {}
    for kind in (Stock, Harness):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, backend = Blocks(Block, 2).double().eval(), kind()
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        for change, tokens in ((None, 10), (None, 14), (attach, 14), (merge, 14)):
            if change:
                change(model)
            inputs = randn(2, tokens, D).double(), randn(2, D).double()
            with torch.inference_mode():
                found = model(*inputs)
                with torch.compiler.set_stance("force_eager"):
                    want = model(*inputs)
            torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
        compiled[kind] = backend.graphs
    assert backend.report.sites
    assert compiled[Harness] == compiled[Stock]
