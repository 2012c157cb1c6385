# SPDX-License-Identifier: Apache-2.0
"""``coda_inductor.explain``: a report of the backend's effect on a model, for users.

``capture`` records the graphs with and without our passes and builds the ``result`` from them,
``page`` renders it. They are imported only when :func:`explain` is called.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coda_inductor.explanation.result import Explanation


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    gpu: str | None = None,
    **kwargs: Any,
) -> "Explanation":
    """Explain the effect of ``torch.compile(model, backend="coda")`` on ``model(*args, **kwargs)``.

    The call is traced, rewritten and fused as by torch.compile, but neither run nor compiled: the
    model, its gradients, the random state and other compiled graphs do not change. With gradients
    enabled and something that requires one, forward and backward are explained together; under
    ``torch.no_grad()``, the inference graph. Tensors may be on any device, ``meta`` included. The
    result shows what would run on ``gpu``, from measurements on that model: no GPU is needed.

    Only a model with graph breaks is run, as a copy, to get past the breaks.

    Args:
        model: a module, or a function of tensors.
        args: its arguments.
        options: as for ``torch.compile(..., options=...)``, e.g. ``{"gate": "always"}``. What
            "strict" would raise is among the near misses.
        gpu: the short name of a measured GPU: "h100", "h200". By default the one of this process,
            or an H100 without one.
        kwargs: passed on to the model. If the model has its own keyword ``options`` or ``gpu``, use
            a wrapper: ``explain(lambda x: model(x, options=o), x)``.

    Returns:
        An :class:`~coda_inductor.explanation.result.Explanation`: print it, ``.save("page.html")``.

    Raises:
        OptionError: unknown option or bad value, or a GPU without measurements.
        PatternError: a pattern file is missing or does not load.
        ExplainError: the model cannot be traced; the cause is chained.
    """
    import torch

    from coda_inductor.errors import ExplainError
    from coda_inductor.explanation.capture import build, capture
    from coda_inductor.gpu import find_gpu, gpu_of
    from coda_inductor.options import parse

    if not callable(model):
        raise ExplainError(
            f"explain(model, *args) takes a module or a function, got {type(model).__name__}"
        )
    settings = replace(parse(None, options), strict=False, tune="never")
    target = gpu_of() if gpu is None else find_gpu(gpu)
    title = str(getattr(model, "__name__", type(model).__name__))
    device = torch.device("cuda" if gpu is None and torch.cuda.is_available() else "meta")
    graphs, breaks = capture(model, args, dict(kwargs), settings, device, target)
    return build(title, graphs, breaks, target)
