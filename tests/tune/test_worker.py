# SPDX-License-Identifier: Apache-2.0
"""What the measuring process does, on a CPU: its kernels are plain ops, its times are made up, its
tensors as a site has them."""

import json
import types
from dataclasses import replace

import pytest
import torch
from measured import configs, site
from programs import fp8, kinds, paired_sums, programs, row_statistics, select

from coda_inductor.errors import KernelError
from coda_inductor.program import Store, reference
from coda_inductor.select.figures import from_row
from coda_inductor.select.site import Site, site_from, site_text
from coda_inductor.tune import inputs, worker
from coda_inductor.tune.inputs import size, tensors
from coda_inductor.tune.timing import Times
from coda_inductor.tune.worker import Worker

ONE = site("rms_partial", m=64, n=64, k=64)
GOOD, OTHER, BAD = configs(ONE)[:3]


@pytest.mark.parametrize(
    "of",
    [ONE, replace(ONE, a_major="m", b_major="n"), replace(ONE, copied=(16, 48)),
     site("norm_bwd_joined", m=64, n=64, k=128), site("swiglu", m=5)],
    ids=lambda of: of.name,
)  # fmt: skip
def test_a_site_in_a_message(of):
    text = json.loads(json.dumps(site_text(of)))
    assert site_from(text) == of


class Bench:
    """A worker, and what stands for the GPU: ``broken`` says what a config does instead."""

    def __init__(self):
        self.said: list[dict] = []
        self.broken = {}
        self.timed: list[list[str]] = []
        self.worker = Worker(self.said.append)

    def kernel(self, as_, bs, operands, text, config, name, *, strict):
        assert strict
        program = worker.EpilogueProgram.from_json(text)
        made = reference.run(program, as_, bs, operands)
        made = [
            x if isinstance(o, Store) else x.expand(-1, 2) / 2 if o.axis == "row" else x
            for o, x in zip(program.outputs, made, strict=True)
        ]
        return self.broken.get(config, lambda x: x)(made)

    def measure(self, calls):
        self.timed.append(list(calls))
        return {name: Times(10.0 + i, 0.001 * (i + 1)) for i, name in enumerate(calls)}

    def ask(self, **message):
        self.said.clear()
        self.worker.answer(message)
        return self.said[-1]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    tensors = inputs.tensors
    monkeypatch.setattr(inputs, "tensors", lambda site, _, **how: tensors(site, "cpu", **how))
    properties = types.SimpleNamespace(uuid="GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(worker, "private_dir", lambda: tmp_path)
    made = Bench()
    monkeypatch.setattr(worker, "gemm_epilogue", made.kernel)
    monkeypatch.setattr(worker.timing, "measure", made.measure)
    return made


def _with_one_wrong(x):
    x = x.clone()
    largest = x.abs().argmax()
    x.view(-1)[largest] = 0  # one of 4096: 0.05 of the norm, 4 of the mean square's root
    return x


def figures_of(answer):
    return from_row({**answer["figures"], "key": ""})[1]


def computes(program, monkeypatch):
    run = lambda as_, bs, operands, *_, **__: reference.run(program, as_, bs, operands)  # noqa: E731
    monkeypatch.setattr(worker, "gemm_epilogue", run)


def test_candidates_are_announced_and_timed_together(bench):
    """A site is compiled before they are there."""
    assert bench.ask(site=site_text(ONE)) == {"ready": True}
    assert not bench.timed
    answer = bench.ask(site=site_text(ONE), configs=[GOOD, OTHER])
    assert bench.said[:-1] == [{"trying": GOOD}, {"trying": OTHER}]
    assert bench.timed == [["plain", "unfused", GOOD, OTHER]]
    found = figures_of(answer)
    assert (found.plain, found.unfused) == (10.0, 11.0)
    assert found.us == {GOOD: 12.0, OTHER: 13.0}
    assert (found.m, found.failed, found.spread) == (64, {}, 0.0025)


@pytest.mark.parametrize("broken", [
    lambda made: [torch.zeros_like(x) for x in made],
    lambda made: [*made[:-1], torch.zeros_like(made[-1])],
    lambda made: [*made[:-1], made[-1] * 1.1],
    lambda made: [_with_one_wrong(made[0]), *made[1:]],
    lambda made: [torch.full_like(x, float("nan")) for x in made],
    lambda made: [torch.full_like(x, float("inf")) for x in made],
])  # fmt: skip
def test_a_candidate_that_is_wrong_is_not_timed(broken, bench):
    bench.broken = {BAD: broken}
    found = figures_of(bench.ask(site=site_text(ONE), configs=[GOOD, BAD]))
    assert list(found.us) == [GOOD]
    assert found.failed[BAD].startswith("wrong: ")
    assert bench.timed == [["plain", "unfused", GOOD]]


def test_a_candidate_that_does_not_run_is_not_timed_and_what_else_fails_is_an_answer(bench):
    def fails_with(error):
        def fails(_):
            raise error

        return fails

    bench.broken = {BAD: fails_with(KernelError("no such kernel"))}
    found = figures_of(bench.ask(site=site_text(ONE), configs=[BAD, GOOD]))
    assert (list(found.us), found.failed) == ([GOOD], {BAD: "no such kernel"})
    bench.broken = {GOOD: fails_with(torch.OutOfMemoryError("CUDA out of memory"))}
    assert bench.ask(site=site_text(ONE), configs=[GOOD]) == {
        "error": "OutOfMemoryError: CUDA out of memory"
    }
    assert bench.ask(site=site_text(ONE)) == {"ready": True}
    assert "error" in bench.ask(site={"program": "{}"})


@pytest.mark.parametrize("program", [paired_sums(), row_statistics()], ids=["pairs", "logsumexp"])
def test_programs_with_several_outputs(program, bench, monkeypatch):
    computes(program, monkeypatch)
    of = Site(program, 32, 64, 64)
    found = figures_of(bench.ask(site=site_text(of), configs=[GOOD]))
    assert (found.failed, list(found.us)) == ({}, [GOOD])


@pytest.mark.parametrize("name", list(fp8()))
def test_sites_of_fp8(name, bench, monkeypatch):
    program = fp8()[name]
    computes(program, monkeypatch)
    ran = {}

    def measured(calls):
        ran.update({name: call() for name, call in calls.items()})
        return {name: Times(10.0, 0.001) for name in calls}

    monkeypatch.setattr(worker.timing, "measure", measured)
    found = figures_of(bench.ask(site=site_text(Site(program, 256, 128, 256)), configs=[GOOD]))
    assert (found.failed, list(found.us)) == ({}, [GOOD])
    assert {x.dtype for x in ran["plain"]} == {torch.bfloat16}
    assert [x.shape for x in ran["plain"]] == [(256, 128)] * len(program.accs)


M, N, K = 24, 32, 64


CHAIN = programs()["chain"]
#: A site, the shapes of A and of B for each term, and of the operands.
SHAPES = [
    (Site(select(), M, N, K), [(M, K)], [(K, N)], [(M, N), (M, N), (), (M,)]),
    (Site(CHAIN, M, N, 3 * K, 3), 3 * [(M, K)], 3 * [(K, N)], [(N,)]),
    # Of weights that are copied each has its own K.
    (Site(CHAIN, M, N, K, copied=(16, 48)), [(M, 16), (M, 48)], [(16, N), (48, N)], [(N,)]),
    (Site(programs()["paired_rows"], M, N, K), [(M, K)], 2 * [(K, N)], 2 * [(M,)] + 3 * [(2 * N,)]),
]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("of", "left", "right", "others"), SHAPES)
def test_operands_have_the_shapes_of_the_site(of, left, right, others, device):
    *products, operands = tensors(of, device)
    assert [sorted(x.shape for x in group) for group in products] == [left, right]
    assert [x.shape for x in operands] == others
    assert all(x.device.type == device for group in (*products, operands) for x in group)
    for group in products if device == "cpu" else ():
        assert group == sorted(group, key=torch.Tensor.data_ptr)
    for row in operands[2:] if of.program.paired and device == "cpu" else ():
        assert torch.equal(row[::2], row[1::2])  # every value twice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_have_the_dtypes_of_the_program(dtype):
    program = select(str(dtype).removeprefix("torch."))
    found = [[x.dtype for x in group] for group in tensors(Site(program, M, N, K), "meta")]
    assert found == [[dtype], [dtype], [dtype, torch.float32, torch.float32, dtype]]


@pytest.mark.parametrize(("a_major", "b_major"), [("k", "n"), ("m", "k")])
def test_majors(a_major, b_major):
    wanted = Site(CHAIN, M, N, K, a_major=a_major, b_major=b_major)
    (a,), (b,), (bias,) = tensors(wanted, "cpu")
    assert a.stride() == ((K, 1) if a_major == "k" else (1, M))
    assert b.stride() == ((1, K) if b_major == "k" else (N, 1))
    assert bias.shape == (N,)


def test_values_are_those_of_a_layer():
    """Products of order one, statistics of rows positive, tables of cosines."""
    (a,), (b,), (_, _, one, column) = tensors(Site(select(), 256, 256, 4096), "cpu")
    assert 0.8 < (a.float() @ b.float()).std().item() < 1.2
    assert column.min() > 0
    assert one == 1
    program = kinds()["rotary"]
    _, _, operands = tensors(Site(program, M, 256, K), "cpu")
    shapes = {o.name: tuple(x.shape) for o, x in zip(program.operands, operands, strict=True)}
    assert shapes == {"rstd": (M,), "cos": (M, 128), "sin": (M, 128)}
    assert all(x.abs().max() <= 1 for x in operands[1:])


@pytest.mark.parametrize("kind", ["scale", "swiglu_train", "norm_bwd_joined"])
def test_a_measurement_needs_at_least_its_inputs_and_outputs(kind):
    wanted = site(kind)
    given = [x for group in tensors(wanted, "meta") for x in group]
    outputs = len(wanted.program.stores) * wanted.m * wanted.n * 2
    needed = sum(x.numel() * x.element_size() for x in given) + outputs
    assert needed < size(wanted) < 10 * needed


@pytest.mark.parametrize("name", ["fp8_dswiglu", "fp8_swiglu"])
def test_values_of_fp8_are_in_its_range(name):
    """Their scales undo what they are multiplied with."""
    program = fp8()[name]
    (a,), bs, operands = tensors(Site(program, 48, 64, 512), "cpu")
    assert (a.stride(), bs[0].stride()) == ((512, 1), (1, 512))
    names = [o.name for o in program.operands]
    product = (a.float() @ bs[0].float()) * operands[names.index("inv_a")][:, None]
    assert 0.3 < product.std() < 3
    assert (bs[0] == torch.zeros((), dtype=bs[0].dtype)).float().mean() < 0.05
