# SPDX-License-Identifier: Apache-2.0
"""TRL's head as operations of the graph.

TRL's trainers (since 1.16) give the model a forward that multiplies by the head and makes
log-probabilities in one autograd function, in chunks that no compiler sees through. ``open_head``
gives that model the same forward with the head in plain operations, which fuse as a loss does: the
logits are in memory once, in the model's dtype, and nothing else of their size.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from coda_inductor.lm_head import entropies, head_logits, log_probs, widened

#: TRL's autograd function, as its forward names it.
_CHUNKED = "_ChunkedLogProbFunction"


def open_head(model: nn.Module) -> Callable[[], None] | None:
    """Let TRL's forward in ``model``, if it has one, compute the head in plain operations. Returns
    the function that undoes it, or None. No other object is changed."""
    for module in model.modules():
        forward = vars(module).get("forward")
        found: Any = [getattr(forward, "__func__", None)]  # outermost first
        while found[-1] is not None and not _is_chunked(found[-1]):
            found.append(getattr(found[-1], "__wrapped__", None))
        if (function := found[-1]) is not None:
            opened: Any = _with(function, **{_CHUNKED: Head})
            if len(found) > 1:
                opened = _wrapped_as(found[-2], opened)
            module.forward = types.MethodType(opened, module)
            return functools.partial(setattr, module, "forward", forward)
    return None


def _wrapped_as(wrapper: types.FunctionType, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under the autocast of ``wrapper``, with results in float32, as accelerate
    prepares a model for 16 bits."""
    from accelerate.utils import convert_outputs_to_fp32

    inner = (cell.cell_contents for cell in wrapper.__closure__ or ())
    cast = next(each for each in inner if isinstance(each, torch.autocast))
    return convert_outputs_to_fp32(cast(function))


def _is_chunked(function: Any) -> bool:
    return _CHUNKED in getattr(getattr(function, "__code__", None), "co_names", ())


def _with(function: types.FunctionType, **names: Any) -> types.FunctionType:
    # Without a name, or Dynamo would take the globals of the module of that name.
    seen = {k: v for k, v in function.__globals__.items() if k != "__name__"} | names
    copy = types.FunctionType(
        function.__code__, seen, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy


class Head:
    """In the place of TRL's autograd function: the same results, the first two with gradients."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        _chunk: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor | None, ...]:
        """Of ``hidden`` (N, H), ``weight`` (V, H) and ``targets`` (N,): log-probabilities of the
        targets; and, if ``outputs`` names them, entropies, ``log(sum(p * p))``, mean logits, and
        whether the target is the first of the largest. Each is (N,), all but the last float32."""
        if not torch.is_autocast_enabled(hidden.device.type):
            weight = weight.to(hidden.dtype)
            bias = None if bias is None else bias.to(hidden.dtype)
        logits = head_logits(hidden, weight, bias, temperature, softcap, scale)
        found = _more(widened(logits), logits.detach(), targets, outputs)
        return (log_probs(logits, targets), *found)


def _more(
    wide: Tensor, logits: Tensor, targets: Tensor, outputs: tuple[str, ...]
) -> Iterator[Tensor | None]:
    for name in ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"):
        if name not in outputs:
            yield None
        elif name == "entropy":
            yield entropies(wide)
        elif name == "log_sum_sq_probs":
            seen = wide.detach()
            yield torch.logsumexp(2 * seen, -1) - 2 * torch.logsumexp(seen, -1)
        elif name == "mean_logits":
            yield wide.detach().mean(-1)
        else:
            yield logits.argmax(-1) == targets
