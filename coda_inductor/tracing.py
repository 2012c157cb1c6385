# SPDX-License-Identifier: Apache-2.0
"""Run a Dynamo graph through our passes, AOTAutograd and the partitioner as in Inductor, but
without code generation. ``explain``, ``check`` and the tests run our passes in this way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from coda_inductor import compat
from coda_inductor.graph.edit import separate_results
from coda_inductor.graph.snapshots import snapshot
from coda_inductor.joint import rewrite
from coda_inductor.memory.partition import Partitioner
from coda_inductor.pipeline import on_dynamo
from coda_inductor.record import Record


@dataclass
class Traced:
    """One graph as it would be compiled.

    Attributes:
        call: a function that runs it op by op.
        whole: the inference graph or the joint one, after ``passes``.
        graphs: the inference graph, or the forward and the backward one.
        saved: the tensors that the forward pass saves for the backward pass.
        training: is there a backward pass?
        wrapper: a function that wraps the compiled graph for the caller.
    """

    call: Callable[..., Any] = lambda: None
    whole: Graph = field(default_factory=Graph)
    graphs: list[Graph] = field(default_factory=list)
    saved: list[Node] = field(default_factory=list)
    training: bool = False
    wrapper: Callable[[Callable[..., Any]], Any] = lambda compiled: compiled


def dry_run(
    gm: GraphModule, inputs: Sequence[Any], record: Record, passes: Callable[..., None] = rewrite
) -> Traced:
    """Run our passes on Dynamo's graph ``gm``, in place, and ``passes`` on the graph that
    AOTAutograd traces from it. A dry record plans for no peak of memory, because that depends on
    the device's memory in use."""
    plans = not record.dry or isinstance(record.options.memory, float | None)
    wrap = on_dynamo(gm, record)
    splits = (
        Partitioner(lambda: record, str) if plans else compat.min_cut_rematerialization_partition
    )
    traced = trace(gm, inputs, lambda graph: passes(graph, record, plans=plans), splits)
    traced.wrapper, traced.call = wrap, wrap(traced.call)
    return traced


def trace(
    gm: GraphModule, inputs: Sequence[Any], passes: Callable[[Graph], None] | None = None,
    splits: Callable[..., Any] = compat.min_cut_rematerialization_partition,
) -> Traced:  # fmt: skip
    """Trace ``gm``, with ``passes`` in the place of ``joint_custom_pre_pass``, and split it by
    ``splits`` into forward and backward pass."""
    traced = Traced()

    def apply(part: GraphModule) -> None:
        if passes is not None:
            passes(part.graph)
            part.recompile()
        traced.whole = snapshot(part.graph)

    def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        traced.training = True
        apply(joint)
        split = splits(joint, joint_inputs, **kwargs)
        traced.graphs += [split[0].graph, split[1].graph]
        outputs = split[0].graph.output_node().args[0]
        traced.saved += [n for n in outputs[kwargs["num_fwd_outputs"] :] if isinstance(n, Node)]
        return split

    def inference(part: GraphModule, _inputs: Any) -> Any:
        apply(part)
        traced.graphs.append(part.graph)
        return as_is(part, _inputs)

    def as_is(part: GraphModule, _inputs: Any) -> Any:
        separate_results(part.graph)
        part.recompile()
        return compat.make_boxed_func(part.forward)

    compiler = compat.aot_autograd(
        fw_compiler=as_is, bw_compiler=as_is, inference_compiler=inference, partition_fn=partition,
        decompositions=compat.select_decomp_table(), keep_inference_input_mutations=True,
    )  # fmt: skip
    traced.call = compiler(gm, inputs)
    return traced
