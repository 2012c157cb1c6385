# SPDX-License-Identifier: Apache-2.0
"""The gate: what stays with cuBLAS because fusing is expected to lose. Costs are an H100's."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checking import check, randn
from measured import site
from programs import parsed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from coda_inductor import arch
from coda_inductor.gpu import H100, match_gpu, tables
from coda_inductor.mainloop import availability
from coda_inductor.options import parse
from coda_inductor.plan import Plan
from coda_inductor.program import Reduce
from coda_inductor.select import roofline
from coda_inductor.select.choice import select
from coda_inductor.select.site import Site
from coda_inductor.sites import Sites

aten = torch.ops.aten
OUT = frozenset({"out0"})
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)


def llama(m: int, d: int = 2048, f: int = 8192, kv: int = 512) -> list[tuple[int, int, int]]:
    """The GEMMs of a layer: o, gate, up, down, q, k, v."""
    return [(m, d, d), (m, f, d), (m, f, d), (m, d, f), (m, d, d), (m, kv, d), (m, kv, d)]


def graph_of(gemms, dtypes=(BF16, BF16), b_stride=None, on="cuda", op=aten.mm.default) -> Graph:
    """A graph of products (m, n, k); ``b_stride`` is that of each right operand."""
    graph = Graph()
    with FakeTensorMode():
        for m, n, k in gemms:
            a, b = graph.placeholder("a"), graph.placeholder("b")
            a.meta["val"] = torch.empty(m, k, dtype=dtypes[0], device=on)
            stride = b_stride or ((n, 1) if dtypes[1].itemsize == 2 else (1, k))
            b.meta["val"] = torch.empty_strided((k, n), stride, dtype=dtypes[1], device=on)
            scales = [a, a] if op is aten._scaled_mm.default else []  # any tensors
            product = graph.call_function(op, (a, b, *scales))
            product.meta["val"] = torch.empty(m, n, dtype=BF16, device=on)
    graph.output(())
    return graph


def plan(graph: Graph, **options) -> Plan:
    return Plan(parse(None, options)).for_graph(graph)


def gemm_of(graph: Graph) -> Node:
    return next(n for n in graph.nodes if n.op == "call_function")


def test_which_graphs_are_too_small():
    """A joint graph is a training step. CUDA graphs lift the limit. In FP8 GEMMs take half as long,
    launching them does not."""
    graph = graph_of(llama(2048))
    assert plan(graph).too_small is None
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("tangents_1")
    assert plan(graph).too_small is not None
    small = graph_of(llama(512))
    assert plan(small).too_small is not None
    assert plan(small, gate="always").too_small is None
    assert plan(small, **{"triton.cudagraphs": True}).too_small is None
    one = [(3072, 4096, 4096)]
    assert plan(graph_of(one)).too_small is None
    assert "too small" in plan(graph_of(one, (E4M3, E4M3))).too_small.text


def test_nothing_is_fused_by_default_where_nothing_was_measured(monkeypatch):
    """Blackwell: no row scale may be moved behind a GEMM that then stays with cuBLAS."""
    unknown = match_gpu("NVIDIA B200", (10, 0), 148, tables(None))
    monkeypatch.setattr("coda_inductor.plan.gpu_of", lambda _: unknown)
    graph = graph_of(llama(8192))
    auto, always = (plan(graph, gate=gate) for gate in ("auto", "always"))
    assert Sites(auto).refusal(gemm_of(graph)).code == "gpu-not-measured"
    assert Sites(always).refusal(gemm_of(graph)) is None
    assert (auto.compiles, always.compiles) == (False, True)


@pytest.mark.parametrize("current", [0, 1])
def test_support_is_asked_of_the_tensors_gpu(current, monkeypatch):
    """An old one and a new one in a machine, whichever is current."""
    monkeypatch.undo()
    graphs = [graph_of(llama(8192), on=f"cuda:{index}") for index in (0, 1)]

    def capability(device=None):
        return [(8, 0), (9, 0)][current if device is None else getattr(device, "index", device)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(arch, "_archs", {})
    monkeypatch.setattr("coda_inductor.plan.gpu_of", lambda _: H100)
    monkeypatch.setattr(availability, "library_stack", lambda: None)
    availability.kernel_stack.cache_clear()
    old, new = (plan(graph, gate="always") for graph in graphs)
    assert "compute capability 8.0 is not supported" in Sites(old).refusal(gemm_of(graphs[0])).text
    assert Sites(new).refusal(gemm_of(graphs[1])) is None
    assert (old.compiles, new.compiles) == (False, True)
    availability.kernel_stack.cache_clear()


@pytest.mark.parametrize(("dtypes", "b_stride", "why"), [
    ((BF16, BF16), None, None),
    ((BF16, BF16), (1, 4100), "its right operand has a stride of 4100"),  # a copy a call
    ((E4M3, E5M2), None, None),
    ((E4M3, E4M3), (2048, 1), "contiguous along N"),
    ((E4M3, BF16), None, "has no epilogue program"),
])  # fmt: skip
def test_which_gemms_may_be_fused(dtypes, b_stride, why):
    graph = graph_of([(8192, 2048, 4096)], dtypes, b_stride)
    found = Sites(plan(graph, gate="always")).refusal(gemm_of(graph))
    assert found is None if why is None else why in found.text


def test_no_compiler_is_started_where_nothing_will_be_compiled():
    """A plan is made before scaled products are raised: they are a GPU's."""
    scaled = graph_of([(8192, 2048, 4096)], (E4M3, E4M3), op=aten._scaled_mm.default)
    for graph in (graph_of(llama(8192)), scaled):
        assert plan(graph).compiles
        assert not plan(graph, gate="never").compiles
        assert not plan(graph, reference=True).compiles


@pytest.mark.parametrize("few", [True, False])
def test_what_a_rewrite_reads_again_is_charged(few):
    """In training the gradient of a packed weight, K is 2048; and starts of products."""
    gemm = gemm_of(graph_of([(512 if few else 8192, 2048, 3072)]))
    a = gemm.args[0].meta["val"]
    auto, always = (Plan(parse(None, {"gate": gate})) for gate in ("auto", "always"))
    assert (auto.split_loses(a, training=True) is not None) == few
    assert auto.split_loses(a, training=False) is None
    assert always.split_loses(a, training=True) is None
    assert (auto.parts_lose(gemm, [1536, 512]) is not None) == few
    assert always.parts_lose(gemm, [1536, 512]) is None


SQUARES = parsed("bfloat16", "", "sq mul acc acc", "acc", "part0:sq")
HEADS = {how: parsed("bfloat16", "", "", "acc", f"part0:acc:row:{how}")
         for how in ("add", "logsumexp")}  # fmt: skip


@pytest.mark.parametrize(("of", "why"), [
    # Fused, weights that are copied together are charged; unfused they are several products.
    (site("norm_bwd", 8192, 2048, 3072, copied=(2048, 512, 512)), None),
    (site("norm_bwd", 128, 4096, 6144, copied=(4096, 1024, 1024)), "us fused"),
    # A norm that stays behind leaves less to save: the fused GEMM took 105 us, cuBLAS 92.
    (site("rms_partial", 8192, 2048, 2048), None),
    (site("rms_partial", 8192, 2048, 2048, after=OUT), "us fused"),
    # Its kernel reads the product that was stored, statistics or not (Gemma 2's sandwich).
    (Site(SQUARES, 8192, 2048, 8192, after=OUT), "statistics save nothing"),
    # Sums over M are a kernel of their own, and so is a log-sum-exp (5.70 ms, 6.20 by cuBLAS).
    (Site(replace(SQUARES, reduces=(Reduce("part0", "sq", "col"),)), 8192, 2048, 2048,
          after=OUT), None),
    (Site(HEADS["add"], 8192, 128256, 2048, after=OUT), "statistics save nothing"),
    (Site(HEADS["logsumexp"], 8192, 128256, 2048, after=OUT), None),
])  # fmt: skip
def test_which_sites_stay_with_cublas(of, why, monkeypatch):
    found = select(of, gated=True).refusal
    assert found is None if why is None else why in found.text
    monkeypatch.setattr(roofline, "fused_us", lambda *_: 1e9)  # whatever it takes
    found = select(replace(of, m=of.m + 128), gated=True).refusal  # of no measured size
    assert (why if why and "nothing" in why else "us fused") in found.text


def test_the_driver_sees_what_stays_behind(monkeypatch):
    """A norm that no GEMM reads, and what reads a sum whose other term is later in the graph."""
    judge, seen = Plan.judge, []

    def spy(self, site):
        seen.append((site.k, bool(site.after)))
        return judge(self, site)

    monkeypatch.setattr(Plan, "judge", spy)

    def function(x, w, y, v, residual, gamma, w2):
        norm = F.rms_norm(residual + F.linear(x[:, 1:], w[:, 1:]), (16,), gamma, 1e-5)
        read = F.rms_norm(residual - F.linear(x[:, 2:], w[:, 2:]), (16,), gamma, 1e-5)
        p = F.linear(x, w) + F.linear(y, v)
        return norm, F.linear(read, w2), p - residual * (p * residual).mean(-1, keepdim=True)

    shapes = ((6, 8), (16, 8), (6, 4), (16, 4), (6, 16), (16,), (24, 16))
    check(function, *(randn(*shape) for shape in shapes))
    assert {(7, True), (6, False), (8, True)} <= set(seen)
