# SPDX-License-Identifier: Apache-2.0
"""Small models in torchao's FP8, and their graphs in float64 with nothing rounded.

Where this torch's CPU kernel of ``_scaled_mm`` takes no scales of rows, a stand-in runs: the
float32 product of the widened factors, times the scales, rounded once. That is its definition.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Harness
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from coda_inductor.pipeline import ON_ATEN
from coda_inductor.semantic.fp8 import scaled_mm
from coda_inductor.semantic.fp8_casts import AMAX, CAST
from zoo.layers import Gated

aten = torch.ops.aten

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Raised(Harness):
    """Stops after the pass that raises FP8: the graph is that of semantic ops."""

    def _rewrite(self, graph, record, **_how):
        for each in ON_ATEN:
            if each.name in ("plan", "noops", "fp8"):
                each.run(graph, record)
        graph.lint()


class Eager:
    """In a harness's place: nothing is compiled."""

    def train(self, function, *args, **_how):
        return function(*args)

    run = torch.no_grad()(train)


D, HIDDEN = 64, 128

_library: list[torch.library.Library] = []


def _stand_in(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, fast=False):
    y = a.float() @ b.float() * scale_a * scale_b
    return (y if bias is None else y + bias).to(out_dtype or a.dtype)


def needs_scaled_mm() -> None:
    """Put the stand-in where this torch has no kernel for the CPU, once a process."""
    a, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        aten._scaled_mm(a, a.t(), one, one.t(), None, None, torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError):
        _library.append(torch.library.Library("aten", "IMPL"))
        _library[0].impl("_scaled_mm", _stand_in, "CPU", allow_override=True)


def convert(model: nn.Module, recipe: str, which: Any = None) -> nn.Module:
    """``model`` after torchao's ``convert_to_float8_training``, with ``which`` as its filter of
    modules; the test is skipped without torchao."""
    float8 = pytest.importorskip("torchao.float8")
    needs_scaled_mm()
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(model, config=config, module_filter_fn=which)


class Packed(nn.Module):
    """A gated MLP with gate and up in one weight."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.both, self.down = nn.Linear(D, 2 * HIDDEN, bias=bias), nn.Linear(HIDDEN, D)

    def forward(self, x):
        g, u = self.both(x).chunk(2, -1)
        return x + self.down(F.silu(g) * u)


class Stack(nn.Module):
    """Layers, each in a checkpoint if wanted."""

    def __init__(self, layers: int = 1, bias: bool = False, checkpointed: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(Gated(D, HIDDEN, bias=bias) for _ in range(layers))
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def serve(model: nn.Module, how: str, batch: torch.Tensor | None = None, **given: Any) -> nn.Module:
    """``model`` after torchao's ``quantize_`` for inference, without a GPU: ``row`` and ``tensor``
    scale inputs dynamically, ``static`` by what they are in ``batch``."""
    pytest.importorskip("torchao.quantization")
    needs_scaled_mm()
    import torchao.quantization as ao
    from torchao.prototype.quantization import quant_api as prototype
    from torchao.quantization import quant_api

    given = {"set_inductor_config": False, **given}
    with pytest.MonkeyPatch.context() as patch:
        for module in (quant_api, prototype):
            patch.setattr(module, "_check_hardware_support", lambda _: None, raising=False)
        if how == "static":
            config = prototype.Float8StaticActivationFloat8WeightConfig
            ao.quantize_(model, config(step="prepare", **given))
            with torch.no_grad():
                model(batch)
            ao.quantize_(model, config(step="convert", **given))
        else:
            given["granularity"] = {"row": ao.PerRow, "tensor": ao.PerTensor}[how]()
            ao.quantize_(model, ao.Float8DynamicActivationFloat8WeightConfig(**given))
    return model


def in_fp8(make: Any, how: str, dtype=torch.bfloat16, example=None, **kwargs: Any) -> nn.Module:
    """``make(**kwargs)`` in a recipe of training, or served; the same weights each time."""
    torch.manual_seed(0)
    model = make(**kwargs).to(dtype)
    if how in RECIPES:
        return convert(model, how)
    return serve(model, how, batch(dtype) if example is None else example)


def ran(harness: Harness, how: str, model: nn.Module, x: torch.Tensor, **kwargs: Any) -> list[Any]:
    """The output, and where ``how`` is a recipe of training all gradients, through ``harness``."""
    if how in RECIPES:
        return trained(harness, model, x, **kwargs)
    return [harness.run(model, x, **kwargs)]


def quantizations(recipe: str, linears: int, inputs: int) -> int:
    """How many a training graph has when equal ones of one pass are one, of ``linears`` layers that
    read ``inputs`` different tensors. Forward: every input and weight. Backward: every weight
    again, the layers' gradients (rowwise by rows and by columns), and where the weights' gradients
    are FP8 every input again."""
    return {
        "tensorwise": 2 * inputs + 3 * linears,
        "rowwise": 2 * inputs + 4 * linears,
        "rowwise_with_gw_hp": inputs + 3 * linears,
    }[recipe]


def products(recipe: str, linears: int) -> int:
    """How many scaled products a graph has."""
    return {"rowwise_with_gw_hp": 2, "tensorwise": 3, "rowwise": 3}.get(recipe, 1) * linears


class _Exact(torch.fx.Interpreter):
    """Runs a graph in float64 with nothing rounded: a cast between floating dtypes is none."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target in (torch.ops.prims.convert_element_type.default, aten._to_copy.default):
            dtype = args[1] if len(args) > 1 else kwargs["dtype"]
            if dtype.is_floating_point and args[0].is_floating_point():
                return args[0].double().clone()
        if target is aten.where.self and args[1].shape != args[2].shape:
            return args[2]  # a rounding of its bits, of which float64 has twice as many
        if target in (aten._scaled_mm.default, scaled_mm):
            (bias,) = (args[7:8] if target is scaled_mm else args[4:5]) or (None,)
            product = args[0] @ args[1] * args[2] * args[3]
            return product if bias is None else product + bias
        if target is AMAX:
            wide = (args[0] if args[1] is None else args[0] * args[1]).abs()
            return wide, wide
        if target is CAST:
            x, factor, scale, _, scale_t, _ = args[:6]
            divide, weight = (*args[6:], None, None)[:2]
            x = x if factor is None else x * factor
            x = x if weight is None else x * weight
            by = [1 if s is None else s for s in (scale, scale_t)]
            by = [1 / s for s in by] if divide else by
            return x * by[0], (x * by[1]).t()
        return tree_map(_widened, super().call_function(target, args, kwargs))


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def exact(graph: torch.fx.Graph) -> list[Any]:
    """What ``graph`` computes from fixed random numbers without any rounding."""
    generator = torch.Generator().manual_seed(3)
    shapes = [node.meta["val"].shape for node in graph.find_nodes(op="placeholder")]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    with torch.no_grad():
        return _Exact(torch.fx.GraphModule({}, graph)).run(*inputs)


def assert_exact(ours: Harness, theirs: Harness) -> None:
    """Both graphs are the same function where nothing is rounded."""
    for have, want in zip(exact(ours.graph), exact(theirs.graph), strict=True):
        bound = 1e-10 * want.abs().max().item()
        torch.testing.assert_close(have, want, rtol=1e-10, atol=bound)


def assert_bits(ours: Any, theirs: Any) -> None:
    """The same tensors, bit for bit; NaN is NaN."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def batch(dtype: torch.dtype = torch.bfloat16, rows: tuple[int, ...] = (2, 16)) -> torch.Tensor:
    """The same one each time."""
    return torch.randn(*rows, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def hard(dtype: torch.dtype = torch.bfloat16, rows: tuple[int, ...] = (2, 16)) -> torch.Tensor:
    """A batch with an outlier, and where there are more, a row of zeros and one of tiny numbers."""
    x = batch(dtype, rows)
    x[0, 0, 3] = 1000
    if rows[1] > 1:
        x[0, 1], x[0, 2] = 0, x[0, 2] * 1e-20
    return x


def trained(harness: Harness, model: nn.Module, x: torch.Tensor, **kwargs: Any) -> list[Any]:
    """The output of ``model`` and all gradients, through ``harness``."""
    x = x.detach().clone().requires_grad_()
    y = harness.train(model, x, **kwargs)
    generator = torch.Generator().manual_seed(5)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]
