# SPDX-License-Identifier: Apache-2.0
"""Compile torchtitan's LM head and cross entropy as one graph.

torchtitan compiles a model block by block, and its loss by itself. The head between them runs in
eager, and the loss reads and keeps the logits in float32. With this module, which a trainer of
torchtitan 0.2 imports by ``--experimental.custom_import=coda_inductor.torchtitan``, the head's
product is a part of the loss's graph, and the logits stay in the head's dtype.

While a model trains, its head returns its input, inside of FSDP's hooks as before. The loss
function then computes logits and loss, in one compiled function. FSDP2 keeps the head's weight
gathered until its gradient is computed; if it does not, ``unshard()`` gathers it again. Parameters,
checkpoints and the scaling of the loss stay as they are. In evaluation the head returns logits.

Changes nothing, with a warning, without ``--compile.enable --compile.backend=coda`` and the
component ``loss``, under tensor and pipeline parallelism, and for other losses.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from coda_inductor.compat import functorch_config
from coda_inductor.errors import CodaError
from coda_inductor.log import logger

try:
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
except ImportError as error:
    raise CodaError(f"coda_inductor.torchtitan needs torchtitan 0.2 ({error})") from error

#: The models of torchtitan that return the result of ``output``, their head.
MODELS = ("deepseek_v3", "gpt_oss", "llama3", "llama4", "qwen3")


class HeadAndLoss:
    """``loss`` of logits, or of the head's input. ``plain`` is the same function, not compiled."""

    def __init__(self, loss: Callable[..., Tensor], plain: Callable[..., Tensor]):
        self.loss, self.plain = loss, plain
        self.hidden: Tensor | None = None

    def attach(self, head: nn.Module) -> None:
        """Let ``head`` return its input while it trains."""
        multiply, plain = head.forward, self.plain

        def forward(hidden: Tensor) -> Tensor:
            if not (head.training and torch.is_grad_enabled()):
                return multiply(hidden)
            self.hidden = hidden
            return hidden

        def head_and_loss(hidden: Tensor, labels: Tensor) -> Tensor:
            return plain(multiply(hidden), labels)

        head.forward = forward
        self.head, self.fused = head, torch.compile(head_and_loss, backend="coda")

    def __call__(self, pred: Tensor, labels: Tensor) -> Tensor:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            return self.loss(pred, labels)
        if pred is not hidden:
            raise CodaError(
                "coda_inductor.torchtitan: the model does not return its head's result as it is,"
                " so that head and loss cannot be one graph: train without this import"
            )
        if isinstance(self.head, FSDPModule):
            self.head.unshard()
        # torchtitan's memory budget is meant for blocks. The backward pass follows at once: logits
        # that it would compute again are 14 ms of a step of 8B that save nothing at its peak.
        with functorch_config.patch(activation_memory_budget=1.0):
            return self.fused(hidden, labels)


def with_head_and_loss(spec: Any) -> Any:
    """The ``TrainSpec`` with head and loss in one graph. Its model's head is ``output``."""
    losses: list[HeadAndLoss] = []

    def build_loss_fn(job_config: Any, **kwargs: Any) -> Callable[..., Tensor]:
        losses.clear()
        loss = spec.build_loss_fn(job_config, **kwargs)
        if why := _obstacle(spec, job_config.compile, kwargs["parallel_dims"]):
            logger.warning("torchtitan's head and loss are left as they are: %s", why)
            return loss
        eager = replace(job_config, compile=replace(job_config.compile, enable=False))
        losses.append(HeadAndLoss(loss, spec.build_loss_fn(eager, **kwargs)))
        return losses[0]

    def parallelize_fn(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        model = spec.parallelize_fn(model, *args, **kwargs)
        for loss in losses:
            loss.attach(model.get_submodule("output"))
            logger.info("torchtitan's head and loss are one graph")
        return model

    return replace(spec, build_loss_fn=build_loss_fn, parallelize_fn=parallelize_fn)


def _obstacle(spec: Any, config: Any, dims: Any) -> str:
    """The reason why head and loss do not become one graph; empty if they do."""
    if not config.enable or config.backend != "coda" or "loss" not in config.components:
        return 'they need --compile.enable --compile.backend=coda, with "loss" among its components'
    if dims.tp_enabled or dims.pp_enabled:
        return "tensor and pipeline parallelism have heads and losses of their own"
    other = spec.build_loss_fn is not build_cross_entropy_loss
    return "the loss of this model is not torchtitan's cross entropy" if other else ""


for _name in MODELS:
    try:
        register_train_spec(_name, with_head_and_loss(get_train_spec(_name)))
    except (ImportError, ValueError) as error:  # another version, or somebody's own
        logger.info("torchtitan's %s is left as it is: %s", _name, error)
logger.info("torchtitan: head and loss can be one graph in %s", ", ".join(MODELS))
