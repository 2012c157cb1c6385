# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens by the head of a language model, for losses that call no model:
policy gradients, distances of two policies, metrics."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probabilities that a head gives to ``targets``, in nats.

    The logits are ``z = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature``, or
    without the cap, and a result is ``z[target] - log(sum(exp(z)))``. The function compiles itself:
    on a GPU the first call takes seconds, also of another temperature or cap. The logits are in
    memory once, in the dtype of ``hidden``, and of their gradient one slice of 256 MiB at a time.
    In a graph that torch.compile captures, and where there is no GPU, the ops are PyTorch's own.

    Args:
        hidden: the head's input (..., K), in a floating dtype.
        weight: of the head, (V, K), in the same dtype, but under autocast.
        targets: classes (...), from 0 to V - 1, in an integer dtype; for -100 the result is 0.
        bias: of the head, (V,).
        temperature: above 0.
        softcap: above 0, as Gemma 2 has it.
        entropy: return the entropies of the softmax too.

    Returns:
        Log-probabilities (...), with ``entropy`` a pair of these and entropies (...), all in
        float32 (float64 for float64). Both have gradients.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a temperature or cap that is not above 0.
    """
    found = hidden.shape[:-1], weight.shape[1:], () if bias is None else bias.shape
    fits = targets.shape, hidden.shape[-1:], () if bias is None else weight.shape[:1]
    if found != fits or weight.dim() != 2:
        biased = "" if bias is None else f", bias {tuple(bias.shape)}"
        raise ValueError(
            f"token_log_probs: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets "
            f"{tuple(targets.shape)}{biased}: give (..., K), (V, K), (...) and (V,)"
        )
    cast = torch.is_autocast_enabled(hidden.device.type)
    if targets.is_floating_point() or (hidden.dtype != weight.dtype and not cast):
        raise ValueError(
            f"token_log_probs: hidden {hidden.dtype}, weight {weight.dtype}, targets "
            f"{targets.dtype}: give hidden and weight one floating dtype, targets integers"
        )
    if temperature <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(
            f"token_log_probs: temperature {temperature}, softcap {softcap}: give numbers above 0"
        )
    how = temperature, softcap, entropy
    plain = torch.compiler.is_compiling() or not _compiles(hidden)
    call = functools.partial(_scores, *how) if plain else _compiled(*how)
    chosen, spread = call(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets.flatten().long()
    )
    chosen = chosen.view(targets.shape)
    return (chosen, spread.view(targets.shape)) if spread is not None else chosen


def _compiles(hidden: Tensor) -> bool:
    return hidden.is_cuda


@functools.cache
def _compiled(*how: Any) -> Callable[..., Any]:
    def call(*tensors: Tensor | None) -> Any:
        return _scores(*how, *tensors)

    # Dynamo compiles a code object a few times only, so each setting has one of its own.
    own = types.FunctionType(call.__code__.replace(), globals(), None, None, call.__closure__)
    return torch.compile(own, backend="coda")


def _scores(
    temperature: float,
    softcap: float | None,
    entropy: bool,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
) -> tuple[Tensor, Tensor | None]:
    logits = head_logits(hidden, weight, bias, temperature, softcap)
    return log_probs(logits, targets), entropies(logits) if entropy else None


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """The logits (M, V) of ``hidden`` (M, K), in its dtype; in float32 over a temperature, which
    without a kernel would round them again (``rewrite.loss.rounded`` keeps 16 bits)."""
    logits = F.linear(hidden, weight, bias)
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if temperature == 1.0:
        return logits
    return (logits if softcap is not None else widened(logits)) / temperature


def widened(logits: Tensor) -> Tensor:
    """``logits`` in float32, or float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Of ``logits`` (M, V) and ``targets`` (M,): the log-probabilities of the targets (M,)."""
    return -F.cross_entropy(widened(logits), targets, reduction="none")


def entropies(logits: Tensor) -> Tensor:
    """Of ``logits`` (M, V): the entropies of their softmax (M,)."""
    logs = F.log_softmax(widened(logits), -1)
    return -(torch.exp(logs) * logs).sum(-1)
