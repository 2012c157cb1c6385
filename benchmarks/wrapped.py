# SPDX-License-Identifier: Apache-2.0
"""How people wrap a model for several GPUs, with stock PyTorch: FSDP2, DDP, tensor parallel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from .measure import device, register

#: What each linear layer of a Llama is under tensor parallelism.
_PLAN = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def _compile(modules: Sequence[nn.Module], backend: str | None) -> None:
    """In place, as ``module.compile()`` does; None leaves them eager."""
    if backend is not None:
        register(backend)
        for module in modules:
            module.compile(backend=backend)


def _blocks(model: nn.Module, backend: str | None) -> None:
    """Each decoder layer: one graph for all of them."""
    _compile(list(model.model.layers), backend)


def _blocks_and_loss(model: nn.Module, backend: str | None) -> None:
    """Each decoder layer, the last norm, and the LM head with the loss as one graph. Only the
    decoder's own code, which calls the layers, runs as it is."""
    _compile([*model.model.layers, model.model.norm], backend)
    if backend is not None:
        model.model.forward = torch.compiler.disable(model.model.forward)
    _compile([model], backend)


def _whole(model: nn.Module, backend: str | None) -> None:
    _compile([model], backend)


def _sharded(
    model: nn.Module, backend: str | None, mesh: DeviceMesh, compile_: Callable[..., None]
) -> nn.Module:
    """FSDP2, parameters in float32 and computed with in bfloat16: a shard a decoder layer."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    compile_(model, backend)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def _replicated(
    model: nn.Module, backend: str | None, _mesh: DeviceMesh, compile_: Callable[..., None]
) -> nn.Module:
    """DDP around what is compiled. Gradients of a graph are reduced behind it: those of one layer
    while the backward pass goes through the one in front."""
    torch._dynamo.config.optimize_ddp = False
    compile_(model, backend)
    return _parallel(model)


def _outside(model: nn.Module, backend: str | None, _mesh: DeviceMesh) -> nn.Module:
    """DDP compiled: torch cuts the graph at the buckets of gradients."""
    wrapped = _parallel(model)
    _compile([wrapped], backend)
    return wrapped


def _parallel(model: nn.Module) -> nn.Module:
    ids = [torch.cuda.current_device()] if device() == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def _tensor_parallel(model: nn.Module, backend: str | None, mesh: DeviceMesh) -> nn.Module:
    """Every linear layer of the decoder over all ranks; norms, embedding and head on each."""
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in _PLAN.items()})
    _compile([model], backend)
    return model


#: Name -> (dtype of the parameters, does each rank have a batch of its own, how to wrap a
#: transformers Llama: a function of it, a backend or None, and the mesh of all ranks).
WAYS: dict[str, tuple[torch.dtype, bool, Callable[..., nn.Module]]] = {
    "fsdp_blocks": (torch.float32, True, functools.partial(_sharded, compile_=_blocks)),
    "fsdp_loss": (torch.float32, True, functools.partial(_sharded, compile_=_blocks_and_loss)),
    "fsdp_model": (torch.float32, True, functools.partial(_sharded, compile_=_whole)),
    "ddp_blocks": (torch.bfloat16, True, functools.partial(_replicated, compile_=_blocks)),
    "ddp_loss": (torch.bfloat16, True, functools.partial(_replicated, compile_=_blocks_and_loss)),
    "ddp_inside": (torch.bfloat16, True, functools.partial(_replicated, compile_=_whole)),
    "ddp_outside": (torch.bfloat16, True, _outside),
    "tensor": (torch.bfloat16, False, _tensor_parallel),
}


class Step:
    """One training step of a wrapped model: loss, backward, AdamW.

    Args:
        model: wrapped, on the device.
        tokens: (1, T) int64, inputs and labels.
    """

    def __init__(self, model: nn.Module, tokens: torch.Tensor):
        self.model, self.tokens = model.train(), tokens
        # The fused optimizer takes no group that mixes tensors with DTensors: under tensor
        # parallelism norms, embedding and head are plain ones.
        kinds: dict[type, list[torch.Tensor]] = {}
        for parameter in model.parameters():
            kinds.setdefault(type(parameter.data), []).append(parameter)
        groups = [{"params": parameters} for parameters in kinds.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)

    def __call__(self) -> torch.Tensor:
        """The loss, before the step."""
        loss: Any = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
