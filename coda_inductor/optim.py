# SPDX-License-Identifier: Apache-2.0
"""Update weights within the backward pass, so that the gradients are never all in memory.

One compiled backward pass returns all gradients at once: a hook on a parameter frees nothing there.
:func:`in_backward` tells the backend which optimizer owns a weight. Then the backward graph gives
each gradient away as soon as it exists and nothing reads the weight any more
(``memory/updates.py``), the optimizer steps for that weight alone, and the memory is free.

Whoever receives a gradient is looked up when the graph runs, because compiled code is kept in
caches and shared by layers: by the memory of the weight, which the graph passes along. A gradient
is never lost: a weight whose optimizer is gone, or that has hooks, gets it from autograd as usual.
"""

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from coda_inductor.compat import has_hooks, make_wrapper_subclass, storage, will_engine_execute_node
from coda_inductor.errors import OptionError
from coda_inductor.log import say_once
from coda_inductor.semantic.define import isolated, opaque

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

#: Packages whose optimizers update each weight from its own gradient and state.
_KNOWN = ("torch.optim", "torchao.")
#: ... except for these, which evaluate the loss again or step for all weights together.
_TOGETHER = ("LBFGS",)


class Updated(Tensor):
    """Stands for a gradient that has been used: it has the shape of the weight, no memory, and
    raises when something reads it, such as ``clip_grad_norm_`` or a ``GradScaler``."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Updated(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.zero_.default):
            return args[0]
        raise RuntimeError(
            f"{func} reads a gradient that the backward pass has already used: "
            "coda_inductor.optim.in_backward updated the weight. Clipping by the norm needs all "
            "gradients at once: to clip, scale, add or log them, train without in_backward, or do "
            "not clip (Trainer: max_grad_norm=0). Weights that uncompiled ops of the loss use too "
            "get a second gradient: compile these ops, or leave such weights out"
        )


class _Owner:
    """One optimizer, and how far each of its weights is in the current step."""

    def __init__(self, optimizer: Optimizer, accumulation_steps: int):
        self.optimizer = weakref.ref(optimizer)
        self.hook = optimizer.register_step_pre_hook(self.settle)
        self.accumulation_steps = accumulation_steps
        self.lock = threading.Lock()  # autograd runs a thread a device
        self.forwards: dict[int, int] = {}  #: id of a weight -> forwards without gradient yet
        self.rounds: dict[int, int] = {}  #: id of a weight -> gradients in ``weight.grad``
        #: Index of a group of parameters -> the settings that its weights were updated by.
        self.used: dict[int, dict[str, Any]] = {}
        self.group = {id(w): i for i, g in enumerate(optimizer.param_groups) for w in g["params"]}

    def settle(self, *_: Any) -> None:
        """Before ``step()``: leave it the weights that were not updated."""
        updated = [w for w in self.weights() if isinstance(w.grad, Updated)]
        for weight in updated:
            weight.grad = None
        waiting = any(weight.grad is not None for weight in self.weights())
        if waiting and not updated and self.accumulation_steps == 1:
            say_once(
                "optim.in_backward: no weight was updated in the backward pass, so that all "
                "gradients were in memory: compile the model with backend='coda' after "
                "in_backward (torch.compiler.reset() forgets what was compiled before), and call "
                "backward once for each forward pass with gradients"
            )
        groups = getattr(self.optimizer(), "param_groups", ())
        if any(_settings(groups[i]) != settings for i, settings in self.used.items()):
            say_once(
                "optim.in_backward: a learning rate or another setting of the optimizer changed "
                "between backward(), which has updated the weights by the old value, and step(): "
                "change it after step()"
            )
        self.forwards.clear()
        self.rounds.clear()
        self.used.clear()

    def weights(self) -> list[Tensor]:
        """All weights of the optimizer."""
        optimizer = self.optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [weight for group in groups for weight in group["params"]]

    def take(self, weight: Tensor, gradient: Tensor) -> None:
        """Update ``weight``, or add ``gradient`` to ``weight.grad`` if more is to come.

        Raises:
            RuntimeError: the weight was updated since the last ``step()``.
        """
        key = id(weight)
        with self.lock:
            if isinstance(weight.grad, Updated):
                raise RuntimeError(  # noqa: TRY004
                    "a second backward pass before optimizer.step(), after in_backward updated the "
                    "weights: call step() after each, or in_backward(optimizer, "
                    "accumulation_steps=N)"
                )
            self.forwards[key] = self.forwards.get(key, 1) - 1
            if self.forwards[key] <= 0:  # several graphs may use it, or several forward passes
                self.rounds[key] = self.rounds.get(key, 0) + 1
            more = self.forwards[key] > 0 or self.rounds[key] < self.accumulation_steps
            optimizer = self.optimizer()
            waits = more or optimizer is None
            if weight.grad is not None:
                gradient = weight.grad + gradient
            elif waits or gradient.stride() != weight.stride():
                # The graph uses its memory again; fused kernels take the strides as equal.
                gradient = torch.empty_like(weight).copy_(gradient)  # as autograd lays it out
            if optimizer is None or waits:
                weight.grad = gradient
                return
            self.hook.remove()  # to be behind hooks of users, which may clip and must see the marks
            self.hook = optimizer.register_step_pre_hook(self.settle)
            index = self.group[key]
            self.used.setdefault(index, _settings(optimizer.param_groups[index]))
            _step(optimizer, optimizer.param_groups[index], weight, gradient)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters, without tensors on a GPU, which it would wait for."""
    values = {k: v for k, v in group.items() if k != "params"}
    return {
        k: v.item() if isinstance(v, Tensor) else v
        for k, v in values.items()
        if not (isinstance(v, Tensor) and (v.is_cuda or v.numel() != 1))
    }


def _step(optimizer: Optimizer, group: dict[str, Any], weight: Tensor, gradient: Tensor) -> None:
    """Run the optimizer's own ``step``, without its hooks, for one weight of a group."""
    groups = optimizer.param_groups
    weight.grad = gradient
    # Undecorated: hooks and profiling are of whole steps.
    step: Callable[[Optimizer], Any] = inspect.unwrap(type(optimizer).step)
    optimizer.param_groups = [{**group, "params": [weight]}]
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups
    increment_version(weight)  # a second backward pass is an error also behind fused kernels
    weight.grad = make_wrapper_subclass(
        Updated, weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device
    )


_OWNERS = WeakIdKeyDictionary()  #: weight -> its ``_Owner``
_BY_MEMORY: dict[int, weakref.ref[Tensor]] = {}  #: address -> weight; checked at each use


def in_backward(optimizer: AnyOptimizer, *, accumulation_steps: int = 1) -> AnyOptimizer:
    """Let backward passes that are compiled by coda update the weights of ``optimizer``.

    Call it before the first compiled step. The loop stays as it is: ``loss.backward()``,
    ``optimizer.step()``, ``optimizer.zero_grad()``. ``step()`` updates what no compiled backward
    pass has updated. State, learning rates and checkpoints are the optimizer's own.

    Args:
        optimizer: one of torch.optim (not LBFGS) or torchao.
        accumulation_steps: backward passes before each ``step()``.

    Returns:
        ``optimizer``.

    Raises:
        OptionError: an optimizer that wants all gradients at once, shared weights, or numbers < 1.
    """
    kind = type(optimizer)
    writer = next(k for k in kind.__mro__ if "step" in vars(k))  # a subclass may clip in its step
    if not writer.__module__.startswith(_KNOWN) or writer.__name__ in _TOGETHER:
        raise OptionError(
            f"in_backward: {kind.__module__}.{kind.__name__} may need all gradients at once: use "
            "an optimizer of torch.optim (not LBFGS) or torchao"
        )
    if accumulation_steps < 1:
        raise OptionError(f"in_backward: accumulation_steps={accumulation_steps}: give 1 or more")
    memory = [_memory(w) for group in optimizer.param_groups for w in group["params"]]
    if len({*memory}) < len(memory):
        raise OptionError(
            "in_backward: two parameters of the optimizer share memory: an update of one would "
            "change the other while it is needed; make them one parameter"
        )
    owner = _Owner(optimizer, accumulation_steps)
    for weight in owner.weights():
        _OWNERS[weight] = owner
    return optimizer


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def _memory(tensor: Tensor) -> int:
    """Equal for tensors that share memory, as far as one can see."""
    return storage(tensor) if _is_plain(tensor) else id(tensor)


def positions(inputs: Sequence[Any]) -> tuple[int, ...]:
    """The positions of inputs of Dynamo's graph that an optimizer may update."""
    known = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor) and x in _OWNERS}
    if not known:
        return ()
    seen = Counter(_memory(x) for x in inputs if isinstance(x, Tensor))
    return tuple(
        i
        for i, x in known.items()
        if _is_plain(x) and x.is_leaf and x.requires_grad and x.numel() and seen[_memory(x)] == 1
        if _OWNERS[x].optimizer() is not None and not has_hooks(x)
    )


class _Receive(torch.autograd.Function):
    """An alias of a weight that no optimizer may update now. The compiled backward pass returns no
    gradient for it, but leaves it in ``_LEFT``; from here it goes its usual way, past hooks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.address = weight.data_ptr()
        known, _ = _LEFT.get(ctx.address, (lambda: None, []))
        if known() is not weight:  # another one lay there
            _LEFT[ctx.address] = weakref.ref(weight), []
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        _, left = _LEFT.get(ctx.address, (None, []))
        return left.pop() if gradient is None and left else gradient


#: Address of a weight behind :class:`_Receive` -> the weight, and its gradients on their way.
_LEFT: dict[int, tuple[weakref.ref[Tensor], list[Tensor]]] = {}


def counted(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """``compiled``, whose backward pass gives the gradients of the inputs at ``places`` away.
    Dynamo uses one graph for several models, so each call looks whether they have an optimizer."""

    def call(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*inputs)
        arguments = list(inputs)
        for i in places:
            weight = arguments[i]
            owner = _OWNERS.get(weight)
            if owner is None or owner.optimizer() is None or has_hooks(weight):
                arguments[i] = _Receive.apply(weight)
            else:
                _LEFT.pop(weight.data_ptr(), None)
                owner.forwards[id(weight)] = owner.forwards.get(id(weight), 0) + 1
        return compiled(*arguments)

    return call


def _find(memory: Tensor) -> Tensor:
    address = memory.data_ptr()
    known = _BY_MEMORY.get(address, lambda: None)()
    if known is None or known.data_ptr() != address:  # moved, or gone
        _BY_MEMORY.clear()
        _BY_MEMORY.update((each.data_ptr(), weakref.ref(each)) for each in list(_OWNERS))
        known = _BY_MEMORY.get(address, lambda: None)()
    if known is None:
        raise RuntimeError(
            "the weight of a compiled backward pass is not that of any optimizer given to "
            "coda_inductor.optim.in_backward: its memory was replaced between the forward and the "
            "backward pass"
        )
    return known


def _give(weight: Tensor, gradient: Tensor) -> None:
    with isolated():
        if (entry := _LEFT.get(weight.data_ptr())) is not None:
            receiver, left = entry[0](), entry[1]
            if receiver is not None and _wanted(receiver) is not False:
                left.append(gradient.clone())  # the graph uses its memory again
            return
        parameter = _find(weight)
        if (wanted := _wanted(parameter)) is None:
            raise RuntimeError(
                "torch.autograd.grad asks for the gradient of a weight that "
                "coda_inductor.optim.in_backward updates in this pass: use loss.backward(), or a "
                "model without in_backward"
            )
        owner = _OWNERS[parameter]
        if wanted:
            owner.take(parameter, gradient)
        else:
            owner.forwards[id(parameter)] = owner.forwards.get(id(parameter), 1) - 1


def _wanted(weight: Tensor) -> bool | None:
    """Does this backward pass add to ``weight.grad``? None if ``torch.autograd.grad`` returns the
    gradient; False where it is of other tensors, such as the inputs of a saliency map."""
    with torch.enable_grad():
        node = get_gradient_edge(weight).node
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:  # of a leaf whose gradient is captured
        return None


def _never(*_: Tensor) -> Tensor:
    raise AssertionError("memory/updates.py replaces it in the backward graph")


#: In a backward graph: hand over a gradient; writes to the weight.
GIVE = opaque("give_gradient_(Tensor(a!) weight, Tensor gradient) -> ()", _give, lambda *_: None)
#: In a joint graph: the same without effect, so that torch's partitioner can place it.
HOLD = opaque(
    "hold_gradient(Tensor weight, Tensor gradient) -> Tensor",
    _never,
    lambda _, gradient: gradient.new_empty(0),
)
