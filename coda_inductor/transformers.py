# SPDX-License-Identifier: Apache-2.0
"""A callback that compiles the model of transformers' ``Trainer`` or of TRL's when training begins:
it has its adapters by then, TRL's too, and is wrapped for several GPUs.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback

from coda_inductor import compat
from coda_inductor.errors import CodaError
from coda_inductor.log import say_once
from coda_inductor.report import GraphReport, kept
from coda_inductor.trl import open_head


class CodaCallback(TrainerCallback):
    """Compile the model for ``backend="coda"`` when training begins, and say what was fused.

    While it trains, ``use_cache`` is False in each config of the model, unless the training
    arguments ask for it, TRL's head, which works in chunks, is operations of the graph
    (:mod:`coda_inductor.trl`), and embeddings lose hooks that checkpoints do not need. A decoder
    gets no ``attention_mask`` while batches have no padding, or, in training, only behind tokens
    and without labels: losses stay, logits of padding do not. Blocks that FSDP2 shards are compiled
    one by one. Under DistributedDataParallel graphs are not cut at its buckets (``optimize_ddp``),
    and ranks compare the gradients of the first step. A model that is compiled already stays so.

    Args:
        how: arguments of torch.compile, e.g. ``options={"memory": 0.5}`` or ``dynamic=True``.

    Raises:
        CodaError: in the first step, if gradients differ between ranks.
        OptionError: in the first step, if an option is unknown or has a bad value.
    """

    def __init__(self, **how: Any):
        self.how, self.undo = how, ExitStack()
        self.compiled: nn.Module | None = None
        self.untold = self.unchecked = False

    def on_train_begin(self, args: Any, *_: Any, model: nn.Module, **__: Any) -> None:
        """Compile ``model``, unless it is compiled."""
        self.untold, self.before, self.unchecked = True, kept(), _under_ddp(model)
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        for config in configs:
            if getattr(config, "use_cache", False) and not args.use_cache:
                config.use_cache = False
                self.undo.callback(setattr, config, "use_cache", True)
        compiled = compat.is_compiled(model)
        if args.torch_compile or (compiled and model is not self.compiled):
            say_once("CodaCallback leaves the model as it is, which is compiled already")
            return
        self.undo.callback(free_inputs(model))
        if self.unchecked:
            self.undo.enter_context(compat.dynamo_config.patch(optimize_ddp=False))
        blocks = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
        if not blocks and (undo := open_head(model)) is not None:
            self.undo.callback(undo)
        for part in () if compiled else blocks or (model,):
            part.compile(backend="coda", **self.how)
        if not blocks and not compiled and any(map(_drops_full_masks, model.modules())):
            varying = self.how.get("dynamic") is None
            compat.wrap_compiled_call(model, partial(without_masks, model, varying=varying))
        self.compiled = model

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        """Compare the gradients of the first step between ranks."""
        if self.unchecked:
            compare_gradients(model)
        self.unchecked = False

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the first step, say what its graphs fused; nothing if there are no reports."""
        if self.untold and (new := [r for r in kept() if all(r is not old for old in self.before)]):
            say_once(summary(new))
        self.untold = False

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore what is not the model's compilation."""
        self.undo.close()


def summary(graphs: Sequence[GraphReport]) -> str:
    """One line: how many GEMMs of ``graphs`` are fused, and why the others are not."""
    sites = [site for graph in graphs for site in graph.sites]
    why = Counter(s.refusal.code for s in sites if not (s.fused or s.refusal is None)).most_common()
    rest = "; not fused: " + ", ".join(f"{n} {code}" for code, n in why) if why else ""
    return f"{len(graphs)} graph(s), {GraphReport('', sites).summary}{rest}"


def free_inputs(model: nn.Module) -> Callable[[], None]:
    """Take away the hooks by which an embedding's result requires gradients, where checkpoints are
    not reentrant and do not need it. Returns the function that undoes it.

    transformers adds one each time that checkpoints are turned on, as TRL's trainers for DPO and
    GRPO do in each step: a graph with adapters breaks at it, and all graphs are compiled again,
    until Dynamo's limit is reached and nothing is compiled."""
    undo = ExitStack()
    found = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    made = [function for function in found if function is not None]
    if not made or any(getattr(f, "keywords", {}).get("use_reentrant") is not False for f in made):
        return undo.close  # without checkpoints the user wants the hook for something else
    for module in model.modules():
        hooks = compat.forward_hooks(module)
        for key, hook in [*hooks.items()]:
            if getattr(hook, "__name__", "") == "make_inputs_require_grads":
                undo.callback(hooks.setdefault, key, hooks.pop(key))
        if isinstance(module, PreTrainedModel):
            vars(module)["enable_input_require_grads"] = _add_no_hook
            undo.callback(vars(module).pop, "enable_input_require_grads", None)
    return undo.close


def _add_no_hook() -> None:
    """In the place of ``enable_input_require_grads``; no lambda, so that a model can be pickled."""


def _drops_full_masks(module: nn.Module) -> bool:
    """Does its file call the function of transformers that drops a mask without padding itself, in
    eager mode? Other models may take no mask for another than one of ones (XLM: by its tokens)."""
    return hasattr(sys.modules.get(type(module).__module__), "create_causal_mask")


def without_masks(model: nn.Module, call: Callable[..., Any], varying: bool) -> Callable[..., Any]:
    """``call`` of ``model`` without an ``attention_mask`` that changes no loss, as no graph can
    know. All calls behind a batch that needs its mask have theirs, so that there is one graph more
    at most. If lengths may be ``varying``, and the first batch looks so, its graph takes any."""
    causal = all(map(_is_causal, model.modules()))
    begun, needed = set[bool](), set[bool]()

    def called(*args: Any, **inputs: Any) -> Any:
        mask, shape = inputs.get("attention_mask"), getattr(inputs.get("input_ids"), "shape", None)
        # Without a mask, transformers would ask positions whether documents are packed.
        alone = all(inputs.get(name) is None for name in ("position_ids", "past_key_values"))
        look = alone and model.training not in needed and not torch.compiler.is_compiling()
        if look and isinstance(mask, torch.Tensor) and mask.shape == shape:
            rows = {k: each for k, each in inputs.items() if getattr(each, "shape", None) == shape}
            if varying and model.training not in begun and _is_padded_to_a_row(mask):
                for each in filter(torch.is_tensor, rows.values()):
                    compat.maybe_mark_dynamic(each, mask.dim() - 1)
            begun.add(model.training)
            asked = rows.keys() == {"input_ids", "attention_mask", "labels"} and model.training
            asked &= causal and not inputs.get("output_router_logits")
            if _changes_nothing(mask, inputs["labels"].to(mask.device) if asked else None):
                inputs["attention_mask"] = None
            else:
                needed.add(model.training)
        return call(*args, **inputs)

    return called


def _is_padded_to_a_row(mask: torch.Tensor) -> bool:
    """Has one row no padding and another some, and is their length, probably that of the longest
    row, no round number? Then the next batch has another length."""
    whole = (mask != 0).all(-1)
    return bool(mask.shape[-1] % 64 and whole.any() and not whole.all())


def _changes_nothing(mask: torch.Tensor, labels: torch.Tensor | None) -> bool:
    """Is it of ones, or are ``labels`` given and zeros only behind a row's last token, where no
    causal token looks and no label asks?"""
    idle = mask == 1  # other numbers may count documents
    if labels is not None:
        idle |= (mask == 0) & (labels == -100)
    return bool(idle.all() & (mask[..., 1:] <= mask[..., :-1]).all())


def _is_causal(module: nn.Module) -> bool:
    """Does no token look at those behind it, nor a loss of experts at all of them?"""
    config, file = getattr(module, "config", None), sys.modules.get(type(module).__module__)
    told = (getattr(each, "is_causal", True) for each in (module, config))
    balanced = getattr(config, "output_router_logits", False)
    return all(told) and not (balanced or hasattr(file, "create_bidirectional_mask"))


def compare_gradients(model: nn.Module) -> None:
    """Compare the norm of each gradient between ranks, by one collective. Raises a CodaError on all
    ranks if a gradient differs, or exists on some of them only."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    norms = [p.new_tensor(-1.0) if p.grad is None else p.grad.norm() for p in trained.values()]
    values = torch.stack([norm.float() for norm in norms]).nan_to_num(-2.0, -2.0, -2.0)
    ends = torch.cat([values, -values])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    high, low = ends[: len(norms)].tolist(), (-ends[len(norms) :]).tolist()
    same = [math.isclose(*pair, rel_tol=1e-3) for pair in zip(high, low, strict=True)]
    if wrong := [name for name, ok in zip(trained, same, strict=True) if not ok]:
        raise CodaError(
            f"CodaCallback: the gradients of {len(wrong)} of {len(trained)} parameters, first "
            f"{wrong[0]}, differ between ranks: DistributedDataParallel has not reduced them. "
            "Train without CodaCallback; if they differ then too, it is not due to coda"
        )
    if unused := [name for name, norm in zip(trained, high, strict=True) if norm == -1.0]:
        text = f"{len(unused)} trained parameters, first {unused[0]}, have no gradient on any rank"
        say_once(f"{text}: if the loss depends on them, train without CodaCallback")


def _under_ddp(model: nn.Module) -> bool:
    several = AcceleratorState().distributed_type.value.startswith("MULTI_")
    return several and not any(isinstance(p, DTensor) for p in model.parameters())
