# SPDX-License-Identifier: Apache-2.0
"""What the measuring process does, on a CPU: its kernels are plain ops, its times are made up, its
tensors as a site has them."""

import json
import types

import pytest
import torch
from measured import configs, site
from programs import fp8, kinds, paired_sums, programs, row_statistics, select

from coda_inductor.errors import KernelError
from coda_inductor.program import Store, reference
from coda_inductor.select.figures import from_row
from coda_inductor.select.site import Site, site_from, site_text
from coda_inductor.tune import inputs, worker
from coda_inductor.tune.inputs import tensors
from coda_inductor.tune.timing import Times
from coda_inductor.tune.worker import Worker

ONE = site("rms_partial", m=64, n=64, k=64)
GOOD, OTHER, BAD = configs(ONE)[:3]


def test_a_site_in_a_message():
    of = site("norm_bwd_joined", m=5, n=64, k=128, a_major="m", copied=(16, 48), groups=2, rows=3)
    assert site_from(json.loads(json.dumps(site_text(of)))) == of


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

    def figures(self, of, *configs):
        answer = self.ask(site=site_text(of), configs=list(configs))
        return from_row({**answer["figures"], "key": ""})[1]


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


def test_candidates_are_announced_and_timed_together(bench):
    """A site is compiled before they are there."""
    assert bench.ask(site=site_text(ONE)) == {"ready": True}
    assert not bench.timed
    found = bench.figures(ONE, GOOD, OTHER)
    assert bench.said[:-1] == [{"trying": GOOD}, {"trying": OTHER}]
    assert bench.timed == [["plain", "unfused", GOOD, OTHER]]
    assert (found.plain, found.unfused) == (10.0, 11.0)
    assert found.us == {GOOD: 12.0, OTHER: 13.0}
    assert (found.m, found.failed, found.spread) == (64, {}, 0.0025)


@pytest.mark.parametrize("broken", [
    lambda made: [*made[:-1], made[-1] * 1.1],
    lambda made: [_with_one_wrong(made[0]), *made[1:]],
    lambda made: [torch.full_like(x, float("nan")) for x in made],
])  # fmt: skip
def test_a_candidate_that_is_wrong_is_not_timed(broken, bench):
    bench.broken = {BAD: broken}
    found = bench.figures(ONE, GOOD, BAD)
    assert list(found.us) == [GOOD]
    assert found.failed[BAD].startswith("wrong: ")
    assert bench.timed == [["plain", "unfused", GOOD]]


def test_a_candidate_that_does_not_run_is_not_timed_and_what_else_fails_is_an_answer(bench):
    def fails_with(error):
        def fails(_):
            raise error

        return fails

    bench.broken = {BAD: fails_with(KernelError("no such kernel"))}
    found = bench.figures(ONE, BAD, GOOD)
    assert (list(found.us), found.failed) == ([GOOD], {BAD: "no such kernel"})
    bench.broken = {GOOD: fails_with(torch.OutOfMemoryError("CUDA out of memory"))}
    assert bench.ask(site=site_text(ONE), configs=[GOOD]) == {
        "error": "OutOfMemoryError: CUDA out of memory"
    }
    assert bench.ask(site=site_text(ONE)) == {"ready": True}
    assert "error" in bench.ask(site={"program": "{}"})


OTHERS = {name: fp8()[name] for name in ("fp8_dswiglu", "fp8_swiglu")}
OTHERS |= {"sums of pairs": paired_sums(), "logsumexp": row_statistics()}


@pytest.mark.parametrize("program", OTHERS.values(), ids=OTHERS)
def test_fp8_and_programs_with_several_outputs(program, bench, monkeypatch):
    run = lambda as_, bs, operands, *_, **__: reference.run(program, as_, bs, operands)  # noqa: E731
    monkeypatch.setattr(worker, "gemm_epilogue", run)
    ran = {}

    def measured(calls):
        ran.update({name: call() for name, call in calls.items()})
        return {name: Times(10.0, 0.001) for name in calls}

    monkeypatch.setattr(worker.timing, "measure", measured)
    found = bench.figures(Site(program, 256, 128, 256), GOOD)
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
    (Site(kinds()["rotary"], M, 256, K), [(M, K)], [(K, 256)], [(M,), (M, 128), (M, 128)]),
]


@pytest.mark.parametrize(("of", "left", "right", "others"), SHAPES)
def test_operands_have_the_shapes_of_the_site(of, left, right, others):
    *products, operands = tensors(of, "cpu")
    assert [sorted(x.shape for x in group) for group in products] == [left, right]
    assert [x.shape for x in operands] == others
    assert all(group == sorted(group, key=torch.Tensor.data_ptr) for group in products)
    for row in operands[2:] if of.program.paired else ():
        assert torch.equal(row[::2], row[1::2])  # every value twice


def test_majors():
    for a_major, b_major, strides in (("k", "n", [(K, 1), (N, 1)]), ("m", "k", [(1, M), (1, K)])):
        (a,), (b,), _ = tensors(Site(CHAIN, M, N, K, a_major=a_major, b_major=b_major), "cpu")
        assert [a.stride(), b.stride()] == strides
