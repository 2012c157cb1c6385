# SPDX-License-Identifier: Apache-2.0
"""If Inductor cannot compile a graph, run it op by op with one warning, so that training goes on.

This is the last resort, after ``falls.py``: for a user's graph that Inductor cannot compile without
us either, and for a backward graph that torch compiles only when it is called, because the forward
pass has then run and cannot change. Every op of a graph, ours included, also runs by itself.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from coda_inductor import compat
from coda_inductor.compat import compile_fx_inner, inductor_config
from coda_inductor.errors import FallbackError
from coda_inductor.falls import cause
from coda_inductor.graph.edit import separate_results
from coda_inductor.graph.nodes import arguments
from coda_inductor.graph.read import op_name
from coda_inductor.graph.snapshots import snapshot
from coda_inductor.graph.walk import closure
from coda_inductor.log import logger, warn_once


def _no_caches() -> Any:
    return inductor_config.patch(force_disable_caches=True)


def _share_draws(graph: Graph) -> None:
    """Compile ops by themselves, in place, if they draw from a seed that forward and backward pass
    share: both must draw the same numbers, and in eager an op ignores its seed."""
    for node in graph.nodes:
        if op_name(node) in ("inductor_random", "inductor_randint"):
            origins = closure([arguments(node)["seed"]], lambda n: n.all_input_nodes)
            # From torch 2.15 on, passes share the state of a generator that a seed is drawn from.
            parts = [u for n in origins for u in n.users if u.target is operator.getitem]
            if any(n.op == "placeholder" for n in origins) or any(
                user.op == "output" for n in (*origins, *parts) for user in n.users
            ):
                node.target = torch.compile(lambda *args, op=node.target, **how: op(*args, **how))


def compiler(
    name: str,
    *,
    strict: bool,
    falls: Callable[[], bool],
    failed: Callable[[], bool] = lambda: False,
    settle: Callable[[Graph], bool] = lambda _: False,
) -> Callable[..., Any]:
    """``compile_fx``'s ``inner_compile``, which compiles a forward, backward or inference graph of
    the Dynamo graph ``name``. If Inductor fails, ``falls`` decides: True runs the graph op by op,
    False lets the error pass. ``failed`` is True if the result is worse than it could be.
    ``settle`` waits for the kernels. It returns True if it changed the graph because one is
    missing: then the graph is compiled again.

    With ``strict``, the result raises FallbackError instead of falling back.
    """

    def compile_graph(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        original = snapshot(gm.graph)  # Inductor's passes change the graph in place
        try:
            # In torch's cache, one failure would become permanent.
            with _no_caches() if failed() else nullcontext():
                compiled = compile_fx_inner(gm, inputs, **kwargs)
            if settle(original):
                context = compat.TracingContext.try_get()
                if context is not None and context.output_strides:
                    context.output_strides.clear()  # of the first time: there must be none
                with _no_caches():
                    compiled = compile_fx_inner(GraphModule(gm, original), inputs, **kwargs)
            return compiled
        except compat.InductorError as error:
            if not falls():
                raise
            part = "backward pass" if kwargs.get("is_backward") else "forward pass"
            text = f"Inductor could not compile it: {cause(error)}"
            if strict:
                raise FallbackError(f"{name}, {part}: {text}") from error
            warn_once(f"{name}, {part},", text, to="one op at a time, which is slower")
            logger.debug("traceback", exc_info=True)
            separate_results(original)
            _share_draws(original)
            return compat.make_boxed_func(GraphModule(gm, original).forward)

    return compile_graph
