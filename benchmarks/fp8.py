# SPDX-License-Identifier: Apache-2.0
"""Suite `fp8`: FP8 by torchao's recipes, under torch.compile and under ours.

A case is the layer of suite `layer` (``layer:8B``) or a whole, unmodified Llama (``llama:8B``, four
layers), in training or in inference. Beside each recipe stands bf16, compiled by both. The Llama's
masks are left out by hand in all variants, which ours would find by itself. In inference a recipe
is ``Float8DynamicActivationFloat8WeightConfig`` with a scale a row or a tensor, without its changes
to Inductor's settings, which all variants share.

torchao need not be installed: an unpacked wheel on PYTHONPATH will do. Where it is missing, its
variants have that as their error.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from . import families, gradients, layer, models
from .cases import FORWARD, RECIPES, TRAINING, Case

if TYPE_CHECKING:
    from .cases import Way
    from .measure import Call

ROWS = 8192
NO_TORCHAO = (
    "torchao cannot be imported ({}): pip install torchao, or unpack its wheel "
    "(unzip torchao-*.whl -d DIR) and set PYTHONPATH=DIR"
)


def every() -> list[Case]:
    """The cases of the suite."""
    sizes = [f"{what}:{size}" for size in ("8B", "1B") for what in ("layer", "llama")]
    prefill = [Case(size, ROWS, FORWARD) for size in sizes if size.startswith("llama")]
    return [Case(size, ROWS, TRAINING) for size in sizes] + prefill


def check(size: str) -> None:
    """Raise KeyError where `size` is none of a case."""
    what, _, of = size.partition(":")
    {"layer": layer.widths, "llama": models.LLAMAS.__getitem__}[what](of)


def work(case: Case) -> Layer | Model:
    """The layer or the model of a case."""
    what, _, size = case.size.partition(":")
    kind = {"layer": Layer, "llama": Model}[what]
    return kind(Case(size, case.rows, case.mode, case.dtype))


def variants(case: Case) -> tuple[str, ...]:
    """The variants that a case has, of :func:`benchmarks.cases.ways`."""
    recipes = RECIPES if case.training else RECIPES[:2]
    by_recipe = [f"{compiler}_{recipe}" for recipe in recipes for compiler in ("compile", "coda")]
    return ("compile", "coda", *by_recipe, "coda_options")


def converted(module: nn.Module, recipe: str, training: bool) -> nn.Module:
    """`module` again, on the same weights, its linear layers but the LM head in FP8.

    Raises ImportError, with the remedy, where torchao is missing.
    """
    own = families.again(module)
    try:
        return (_trained if training else _inferred)(own, recipe)
    except ImportError as error:
        raise ImportError(NO_TORCHAO.format(error)) from error


def _trained(module: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(
        module, config=config, module_filter_fn=lambda _, name: name != "lm_head"
    )


def _inferred(module: nn.Module, recipe: str) -> nn.Module:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, quantize_
    from torchao.quantization.granularity import PerRow, PerTensor

    config = Float8DynamicActivationFloat8WeightConfig(
        granularity={"rowwise": PerRow, "tensorwise": PerTensor}[recipe](),
        set_inductor_config=False,
    )
    quantize_(module, config, lambda m, name: isinstance(m, nn.Linear) and name != "lm_head")
    return module


class Layer(layer.Layer):
    """The layer of one case, as in suite `layer`."""

    def compiled(self, way: Way) -> Call:
        """As in suite `layer`, converted before."""
        own = copy.copy(self)
        if way.fp8:
            own.block = converted(self.block, way.fp8, self.training)
        return super(Layer, own).compiled(way)


class Model(families.Model):
    """The Llama of one case, as in suite `families`, its attention told to be causal."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.model: Any = families.causal(self.model)

    def compiled(self, way: Way) -> Call:
        """As in suite `families`, converted before."""
        own = copy.copy(self)
        if way.fp8:
            own.model = converted(self.model, way.fp8, self.training)
        return super(Model, own).compiled(way)

    def errors(self, calls: dict[str, Call]) -> dict[str, dict[str, float]]:
        """Relative error of the last logits or of each parameter's gradient in each call."""
        exact = self.exact()
        truths = list(exact.values())
        return {name: gradients.errors(list(exact), call(), truths) for name, call in calls.items()}
