# SPDX-License-Identifier: Apache-2.0
"""The gate: what stays with cuBLAS because fusing is expected to lose. Costs are an H100's."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from checking import check, randn
from programs import kinds
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

import coda_inductor
from coda_inductor.mainloop import availability
from coda_inductor.options import parse
from coda_inductor.plan import Plan
from coda_inductor.program import EpilogueProgram, Reduce, Step, Store
from coda_inductor.select import device, gate, roofline
from coda_inductor.select.choice import select
from coda_inductor.select.device import H100, known, tables
from coda_inductor.select.site import Site


def llama(m: int, d: int = 2048, f: int = 8192, kv: int = 512) -> list[tuple[int, int, int]]:
    """The GEMMs of a layer: o, gate, up, down, q, k, v."""
    return [(m, d, d), (m, f, d), (m, f, d), (m, d, f), (m, d, d), (m, kv, d), (m, kv, d)]


@pytest.mark.parametrize(
    ("tokens", "bound"), [(1, True), (512, True), (2048, False), (8192, False)]
)
def test_small_layers_are_bound_by_the_host(tokens, bound):
    reason = gate.host_bound(llama(tokens))
    if bound:
        assert "the host is the limit" in reason.text
    else:
        assert reason is None


def test_a_training_step_takes_the_host_longer():
    """Autograd, once a step: what a layer alone waits for is little in a model of sixteen."""
    layer = 3 * llama(2048, d=2304)
    assert gate.host_bound(layer) is None
    assert "too small" in gate.host_bound(layer, training=True).text
    assert gate.host_bound(16 * layer, training=True) is None
    quick = dataclasses.replace(H100, host_step_us=0.0, host_trained_us=20.0)
    assert gate.host_bound(layer, quick, training=True) is None


def test_a_joint_graph_is_a_training_step(monkeypatch):
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    graph = graph_of(2048)
    assert Plan.of(parse(None, {}), graph).too_small is None
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("tangents_1")
    assert Plan.of(parse(None, {}), graph).too_small is not None


OUT = frozenset({"out0"})


def lost(site: Site) -> str | None:
    """Why the site stays with cuBLAS."""
    why = select(site, gated=True).refusal
    return why and why.text


def graph_of(m: int, device: str = "cuda") -> Graph:
    graph = Graph()
    with FakeTensorMode():
        for _, n, k in llama(m):
            a, b = graph.placeholder("a"), graph.placeholder("b")
            a.meta["val"] = torch.empty(m, k, dtype=torch.bfloat16, device=device)
            b.meta["val"] = torch.empty(k, n, dtype=torch.bfloat16, device=device)
            graph.call_function(torch.ops.aten.mm.default, (a, b))
    graph.output(())
    return graph


@pytest.mark.parametrize(
    ("options", "small"),
    [({}, True), ({"gate": "always"}, False), ({"triton.cudagraphs": True}, False)],
)
def test_only_auto_without_cuda_graphs_is_limited(options, small):
    plan = Plan.of(parse(None, options), graph_of(512))
    assert (plan.too_small is not None) == small
    assert Plan.of(parse(None, options), graph_of(8192)).too_small is None


def test_nothing_is_fused_by_default_where_nothing_was_measured(monkeypatch):
    """Blackwell: no row scale may be moved behind a GEMM that then stays with cuBLAS."""
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    unknown = known("NVIDIA B200", (10, 0), 148, 232448, tables(None))
    monkeypatch.setattr("coda_inductor.plan.gpu_of", lambda _: unknown)
    graph = graph_of(8192)
    gemm = next(n for n in graph.nodes if n.op == "call_function")
    auto, always = (Plan.of(parse(None, {"gate": g}), graph) for g in ("auto", "always"))
    assert "nothing was measured on B200 (compute capability 10.x)" in auto.legal(gemm).text
    assert always.legal(gemm) is None
    assert (auto.compiles, always.compiles) == (False, True)


@pytest.mark.parametrize("current", [0, 1])
def test_support_is_asked_of_the_tensors_gpu(current, monkeypatch):
    """An old one and a new one in a machine, whichever is current."""
    graphs = [graph_of(8192, f"cuda:{index}") for index in (0, 1)]

    def capability(device=None):
        return [(8, 0), (9, 0)][current if device is None else getattr(device, "index", device)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(device, "_majors", {})
    monkeypatch.setattr("coda_inductor.plan.gpu_of", lambda _: H100)
    monkeypatch.setattr(availability, "library_stack", lambda: None)
    availability.kernel_stack.cache_clear()
    old, new = (Plan.of(parse(None, {"gate": "always"}), graph) for graph in graphs)
    gemms = [next(n for n in graph.nodes if n.op == "call_function") for graph in graphs]
    assert "compute capability 8.0 is not supported" in old.legal(gemms[0]).text
    assert new.legal(gemms[1]) is None
    assert (old.compiles, new.compiles) == (False, True)
    availability.kernel_stack.cache_clear()


def test_a_weight_that_a_kernel_would_copy_at_every_call_stays_with_cublas(monkeypatch):
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    graph = graph_of(8192)
    gemm = next(n for n in graph.nodes if n.op == "call_function")
    plan = Plan.of(parse(None, {"gate": "always"}), graph)
    assert plan.legal(gemm) is None
    weight = gemm.args[1]
    with FakeTensorMode():
        weight.meta["val"] = torch.empty_strided(
            (2048, 2048), (1, 2052), dtype=torch.bfloat16, device="cuda"
        )
    assert "its right operand has a stride of 2052" in plan.legal(gemm).text


@pytest.mark.parametrize("options", [{"gate": "never"}, {"reference": True}], ids=str)
def test_no_compiler_is_started_where_nothing_will_be_compiled(monkeypatch, options):
    monkeypatch.setattr(availability, "kernel_stack", lambda *_: None)
    assert Plan.of(parse(None, {}), graph_of(8192)).compiles
    assert not Plan.of(parse(None, options), graph_of(8192)).compiles
    monkeypatch.setattr(
        availability, "kernel_stack", lambda *_: "compute capability 8.0 is not supported"
    )
    assert not Plan.of(parse(None, {}), graph_of(8192)).compiles


@pytest.mark.parametrize(("m", "loses"), [(512, True), (8192, False)])
def test_what_a_rewrite_reads_again_is_charged_in_training(m, loses):
    """The first GEMM of the layer has K = 2048."""
    gemm = next(n for n in graph_of(m).nodes if n.op == "call_function")
    a = gemm.args[0].meta["val"]
    plan, always = (Plan(parse(None, {"gate": g})) for g in ("auto", "always"))
    assert (plan.split_loses(a, training=True) is not None) == loses
    assert plan.split_loses(a, training=False) is None
    assert always.split_loses(a, training=True) is None


@pytest.mark.parametrize("m", [512, 8192])
def test_a_layer_norm_of_few_rows_stays(m):
    gemms = [n for n in graph_of(m).nodes if n.op == "call_function"][:1] * 2
    plan, always = (Plan(parse(None, {"gate": g})) for g in ("auto", "always"))
    assert (plan.norm_loses(gemms) is not None) == (m == 512)
    assert always.norm_loses(gemms) is None


def test_a_sum_whose_weights_are_copied_together():
    """Fused, a copy is charged. A regression: unfused it was priced as one product, and the
    gradient through q, k and v of a Llama of 2048 columns was left to cuBLAS."""
    program = kinds()["norm_bwd"]
    assert lost(Site(program, 8192, 2048, 3072, copied=(2048, 512, 512))) is None
    # Few rows, many weights: the copy costs more than all that is saved.
    assert lost(Site(program, 512, 4096, 6144)) is None
    assert lost(Site(program, 128, 4096, 6144, copied=(4096, 1024, 1024))) is not None


def test_a_norm_that_stays_behind_leaves_less_to_save():
    program = kinds()["rms_partial"]
    assert lost(Site(program, 8192, 2048, 2048)) is None
    # Measured: the fused GEMM took 105 us, cuBLAS 92, and the norm's kernel ran in both cases.
    assert lost(Site(program, 8192, 2048, 2048, after=OUT)) is not None


def test_statistics_alone_of_a_norm_that_stays_behind_save_nothing():
    """Its kernel reads the product that was stored, statistics or not (Gemma 2's sandwich)."""
    program = EpilogueProgram(
        accs=("acc",),
        a_dtype="bfloat16",
        steps=(Step("sq", "mul", ("acc", "acc")),),
        stores=(Store("out0", "acc", "bfloat16"),),
        reduces=(Reduce("part0", "sq"),),
    )
    assert lost(Site(program, 8192, 2048, 2048)) is None
    assert "statistics save nothing" in lost(Site(program, 8192, 2048, 8192, after=OUT))
    columns = dataclasses.replace(program, reduces=(Reduce("part0", "sq", "col"),))
    assert lost(Site(columns, 8192, 2048, 2048, after=OUT)) is None  # saves a kernel


@pytest.mark.parametrize("head", [False, True])
def test_the_driver_sees_what_stays_behind(head, monkeypatch):
    seen = []
    judge = Plan.judge

    def spy(self, site, a):
        seen.append(((site.n, site.k), bool(site.after)))
        return judge(self, site, a)

    monkeypatch.setattr(Plan, "judge", spy)

    def function(x, w, residual, gamma, w2):
        n = F.rms_norm(residual + F.linear(x, w), (16,), gamma, 1e-5)
        return F.linear(n, w2) if head else n

    shapes = ((6, 8), (16, 8), (6, 16), (16,), (24, 16))
    check(function, *(randn(*shape) for shape in shapes))
    assert ((16, 8), not head) in seen


def test_a_site_that_would_lose_is_named_with_both_times():
    assert lost(Site(kinds()["swiglu"], 8192, 8192, 2048)) is None
    assert "us fused" in lost(Site(kinds()["scale"], 512, 512, 2048))


def lm_head(combine: str = "logsumexp") -> EpilogueProgram:
    """The product as it is, and a row reduction of it."""
    return EpilogueProgram(
        ("acc",),
        "bfloat16",
        stores=(Store("out0", "acc", "bfloat16"),),
        reduces=(Reduce("part0", "acc", "row", combine),),
    )


def test_a_log_sum_exp_saves_a_pass_also_in_front_of_an_elementwise_kernel(monkeypatch):
    """A sum would not: the kernel that follows could take it while it reads the product."""
    shape = (8192, 128256, 2048)
    total, head = (Site(lm_head(combine), *shape, after=OUT) for combine in ("add", "logsumexp"))
    assert "statistics save nothing" in lost(total)
    assert lost(head) is None  # measured: 5.70 ms, and 6.20 by cuBLAS
    monkeypatch.setattr(roofline, "fused_us", lambda *_: 1e9)
    assert "statistics save nothing" in lost(total)
    assert "us fused" in lost(Site(lm_head(), 8192, 64000, 2048, after=OUT))


def test_explains_estimate_is_the_gates_own_verdict():
    """A regression: it compared the times and forgot the gate's other reason."""

    def sandwich(x, w, residual):
        y = (x @ w).float()
        return residual + (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()

    inputs = [torch.randn(64, 64).bfloat16() for _ in range(3)]
    with torch.no_grad():
        (site,) = coda_inductor.explain(sandwich, *inputs).fused
    assert "statistics save nothing" in site.estimate.refusal.text
