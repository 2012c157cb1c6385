# SPDX-License-Identifier: Apache-2.0
"""Run one pass on a graph that is made by hand; the codes of what was refused."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.compat import select_decomp_table
from coda_inductor.graph.edit import fake_mode
from coda_inductor.options import parse
from coda_inductor.plan import Plan
from coda_inductor.record import Record
from coda_inductor.refusal import Refusal
from coda_inductor.sites import Sites


def aten_graph(function: Callable[..., Any], *args: torch.Tensor, decomposed=False) -> Graph:
    """The aten graph of ``function``, with recorded values as AOTAutograd leaves them;
    ``decomposed`` as Inductor asks for."""
    table = select_decomp_table() if decomposed else None
    graph = make_fx(function, table, tracing_mode="fake")(*args).graph
    graph.eliminate_dead_code()  # outputs of an op that nobody reads
    return graph


def run_pass(run: Callable[[Graph, Record], None], graph: Graph, **options: Any) -> Record:
    """Apply one pass with these options, as torch would: under the mode that recorded the graph's
    values. Returns what it said. The graph must be in order then."""
    record = Record(parse(None, options))
    record.sites = Sites(Plan(record.options).for_graph(graph))
    with fake_mode(list(graph.nodes)):
        run(graph, record)
    graph.lint()
    return record


def codes(of: Any) -> set[str]:
    """The codes of all that a record, or a harness, refused: near misses, and unfused GEMMs."""
    sites = [site.refusal for site in of.report.sites if not site.fused]
    return {why.code for why in (*of.report.refusals, *sites) if isinstance(why, Refusal)}


def refused(
    run: Callable[[Graph, Record], None],
    function: Callable[..., Any],
    *args: torch.Tensor,
    **options: Any,
) -> set[str]:
    """The codes of what a pass refuses in the graph of ``function``, which it leaves as it was."""
    graph = aten_graph(function, *args)
    before = str(graph)
    record = run_pass(run, graph, **options)
    assert str(graph) == before
    return codes(record)
