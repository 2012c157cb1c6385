# SPDX-License-Identifier: Apache-2.0
"""Configs, which runs where none was measured, and the reasons for having no kernel."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest
import torch
from programs import kinds, one_op, programs

from coda_inductor.errors import KernelError
from coda_inductor.mainloop import availability
from coda_inductor.mainloop.requirements import CUTEDSL, QUACK
from coda_inductor.program import EpilogueProgram, Operand, Step, Store
from coda_inductor.select import choice, legality
from coda_inductor.select.choice import select
from coda_inductor.select.config import (
    HOPPER,
    HOPPER_LEAN,
    HOPPER_MORE,
    Config,
    legal_configs,
    mainloop_stages,
)
from coda_inductor.select.legality import unsupported
from coda_inductor.select.site import Site

SCALE, PAIR = kinds()["scale"], kinds()["swiglu"]


def sum_of_tiles(count: int, dtype: str = "float32") -> EpilogueProgram:
    names = [f"t{i}" for i in range(count)]
    steps, last = [], "acc"
    for name in names:
        steps.append(Step(f"s_{name}", "add", (last, name)))
        last = steps[-1].name
    return EpilogueProgram(
        accs=("acc",),
        a_dtype="bfloat16",
        operands=tuple(Operand(name, "tile", dtype) for name in names),
        steps=tuple(steps),
        stores=(Store("out0", last, "bfloat16"),),
    )


MODES = [
    Config(128, 192, 2, 1, True, lean=True),
    Config(128, 192, 2, 1, True, swizzle=4),
    Config(128, 192, 2, 1, True, dynamic=True),
    Config(256, 128, 2, 1, False, split_k=2),
    Config(64, 64, 1, 1, True, lean=True, swizzle=1, dynamic=True, split_k=4),
]


def test_text_form_round_trips():
    every = HOPPER + HOPPER_LEAN + HOPPER_MORE
    assert len({str(config) for config in every}) == len(every)
    for config in (*every, *MODES):
        assert Config.parse(str(config)) == config
    assert str(Config(128, 192, 2, 1, True)) == "128x192:2x1:pp"
    assert [str(config) for config in MODES] == [
        "128x192:2x1:pp:lean",
        "128x192:2x1:pp:sw4",
        "128x192:2x1:pp:dyn",
        "256x128:2x1:co:k2",
        "64x64:1x1:pp:lean:sw1:dyn:k4",
    ]


@pytest.mark.parametrize(
    "text",
    ["128x192", "128x192:2x1:xx", "128x192:2x1:pp:k2:dyn", "128x192:2x1:pp:np",
     "128x192:2x1:pp:sw8", "128x192:2x1:pp:k1", "128x192:2x1:pp:k02", "128x192:2x1:pp:p120",
     "0128x192:2x1:pp", "128x192:2x1:pp:k0"],
)  # fmt: skip
def test_each_config_has_one_text(text):
    with pytest.raises(KernelError, match=f"'{text}' is not"):
        Config.parse(text)


def test_two_cta_tiles_of_blackwell_are_halved():
    config = Config(256, 256, 2, 1, False)
    assert config.cta_tile_m(10) == 128
    assert config.cta_tile_m(9) == 256


def test_paired_configs_suit_half_wide_stores():
    for config in legal_configs(kinds()["swiglu"]):
        assert config.tile_n % 32 == 0
        assert config.tile_m != 192


def test_heavy_programs_have_fewer_configs_then_none():
    counts = [len(legal_configs(sum_of_tiles(n))) for n in (0, 2, 16)]
    assert counts[0] >= len(HOPPER)
    assert counts[0] > counts[1] > counts[2] == 0
    assert "shared memory" in unsupported(sum_of_tiles(16), 4096, 4096).text


@pytest.mark.parametrize("name", list(kinds()))
def test_what_was_measured_stands_first(name):
    """Ties go to the first: they must not change when candidates are added."""
    program = kinds()[name]
    legal = legal_configs(program)
    old = [c for c in legal if c in HOPPER + HOPPER_LEAN]
    assert list(legal[: len(old)]) == old
    assert set(legal[len(old) :]) <= set(HOPPER_MORE)
    order = [(*HOPPER, *HOPPER_LEAN, *HOPPER_MORE).index(c) for c in legal]
    assert order == sorted(order)


@pytest.mark.parametrize("name", list(kinds()))
def test_what_is_legal_is_written_and_so_is_its_twin(name):
    legal = legal_configs(kinds()[name])
    for config in legal:
        twin = config.dynamic_twin()
        assert config.unwritten is twin.unwritten is None
        assert Config.parse(str(twin)) == twin == twin.dynamic_twin()
        assert (twin.dynamic, twin.tile_m, twin.tile_n) == (True, config.tile_m, config.tile_n)
    twins = {c.dynamic_twin() for c in legal if "dyn" not in str(c)}
    assert {c for c in legal if c.dynamic} <= twins


def test_a_log_sum_exp_is_taken_of_whole_sums():
    split = {c.split_k for c in legal_configs(SCALE)}
    assert split == {1, 2, 4}
    for name in ("logsumexp", "swiglu_train"):
        assert {c.split_k for c in legal_configs(kinds()[name])} == {1}


def test_k_of_two_terms_is_not_split():
    one, two = (legal_configs(kinds()["norm_bwd"], terms=terms) for terms in (1, 2))
    assert two == tuple(c for c in one if c.split_k == 1) != one
    blackwell = legal_configs(kinds()["norm_bwd"], 10, terms=2)
    assert {c.split_k for c in blackwell} == {1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("128x152:2x1:pp", "multiples of 16 up to 208"),
        ("128x224:2x1:pp", "up to 208"),
        ("192x144:2x1:pp", "up to 128"),
        ("192x160:2x1:co:lean", "up to 0"),  # wrong sums
        ("192x192:1x2:co", "up to 0"),  # wrong for pairs
        ("320x128:2x1:co", "up to 0"),  # the same
        ("256x224:2x1:co", "up to 208"),
        ("96x128:2x1:co", "up to 0"),
        ("128x128:4x2:pp", "at most 4"),
        ("128x128:2x1:co:dyn", None),
        ("256x144:2x1:co", None),
        ("64x16:1x1:co", None),
    ],
)
def test_what_hopper_has_no_kernel_for(text, why):
    found = Config.parse(text).unwritten
    assert found is None if why is None else why in found


@pytest.mark.parametrize("major", [7, 8, 13])
def test_architectures_without_kernels(major, monkeypatch):
    assert legal_configs(SCALE, major) == ()
    monkeypatch.setattr(legality, "arch_of", lambda _: major)
    why = unsupported(SCALE, 4096, 4096)
    assert (why.code, f"{major}.x" in why.text, "quack" in why.text) == ("old-gpu", True, True)


def test_lean_configs_are_for_16_bit_tiles():
    legal = legal_configs(sum_of_tiles(2, "bfloat16"))
    assert {c.lean for c in legal} == {True, False}
    for program in (sum_of_tiles(0), sum_of_tiles(2, "float32")):
        assert not any(c.lean for c in legal_configs(program))


def test_lean_epilogues_leave_more_to_the_main_loop():
    for name in ("dswiglu", "norm_bwd"):
        config = Config(128, 192, 2, 1, True)
        lean = replace(config, lean=True)
        assert mainloop_stages(kinds()[name], lean) == mainloop_stages(kinds()[name], config) + 1


@pytest.mark.parametrize("arch", [10, 12])
def test_of_another_generation_the_first_runs(arch, monkeypatch):
    monkeypatch.setattr(choice, "arch_of", lambda _: arch)
    for n in (1024, 4096, 14336):
        found = select(Site(SCALE, 8192, n, 3072), gated=False)
        assert found.config == str(legal_configs(SCALE, arch)[0])


def test_symbolic_rows_are_chosen_by_their_hint():
    """Few rows want small tiles, many want large ones."""
    seen = []

    def backend(graph, example_inputs):
        rows, _ = (x for x in example_inputs if isinstance(x, torch.SymInt))
        seen.append(select(Site(SCALE, rows, 4096, 4096), gated=False))
        return graph.forward

    for rows in (64, 2048):
        torch._dynamo.reset()
        torch.compile(lambda x: x + x.shape[0], backend=backend, dynamic=True)(torch.ones(rows, 4))
    few, many = seen
    assert few.config != many.config
    assert few.fused_us < many.fused_us


def test_every_representative_program_is_supported():
    for program in [*programs().values(), one_op("tanh")]:
        assert unsupported(program, 4096, 4096) is None


@pytest.mark.parametrize(
    ("program", "n", "k", "major", "why"),
    [
        (replace(SCALE, a_dtype="float32", b_dtype="float32"), 64, 64, "k", "float32 GEMM"),
        (SCALE, 60, 64, "k", "N=60"),
        (SCALE, 64, 63, "k", "K=63"),
        (SCALE, 64, 0, "k", "K=0"),
        (replace(SCALE, stores=()), 64, 64, "k", "without a tile store"),
        (replace(SCALE, stores=(Store("o", "x", "float64"),)), 64, 64, "k", "float64"),
        (replace(PAIR, stores=(Store("o", "y", "float32"),)), 64, 64, "k", "16-bit"),
        (PAIR, 64, 64, "n", "K-major"),
        (
            replace(
                SCALE,
                operands=(Operand("s", "scalar", "float32"),),
                steps=(Step("x", "neg", ("s",)),),
            ),
            64, 64, "k", "one value",
        ),
    ],
)  # fmt: skip
def test_reasons(program, n, k, major, why):
    assert why in unsupported(program, n, k, b_major=major).text


def test_a_matrix_that_tma_cannot_read_where_it_lies():
    """Parameters in one flat buffer, columns of a wider matrix."""
    flat = torch.empty(64 * 72, dtype=torch.bfloat16)
    weight = flat[: 64 * 64].view(64, 64)
    assert legality.unaligned("w", weight) is None
    assert legality.unaligned("w", weight.t()) is None
    assert legality.unaligned("w", flat[8 : 8 + 64].view(1, 64)) is None
    assert legality.unaligned("w", weight[:, :1].expand(64, 8)) is None
    shifted = flat[1 : 1 + 64 * 64].view(64, 64)
    assert "w has a storage offset of 1" in legality.unaligned("w", shifted).text
    wide = torch.empty(8, 68, dtype=torch.bfloat16)[:, :64]
    assert "w has a stride of 68" in legality.unaligned("w", wide).text


@pytest.fixture
def fresh_stack():
    availability.library_stack.cache_clear()
    availability.kernel_stack.cache_clear()
    yield
    availability.library_stack.cache_clear()
    availability.kernel_stack.cache_clear()


def test_stack_names_a_missing_or_foreign_quack(fresh_stack, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    installed = {QUACK.package: "0.6.5", CUTEDSL.package: "4.8.1"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    def stack(**changes):
        installed.update(changes)
        availability.library_stack.cache_clear()
        availability.kernel_stack.cache_clear()
        why = availability.kernel_stack()
        return why and why.text

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert stack() is None
    for name, good, bad in (
        (QUACK.package, "0.6.9", ("0.6.4", "0.6.5rc1", "0.7.0", "0.7.0.dev1", "1.0")),
        (CUTEDSL.package, "4.8.0", ("4.7.9", "4.8.0.dev0", "4.9.0", "4.10")),
    ):
        for wrong in bad:
            why = stack(**{name: wrong})
            assert why.startswith(f"{name} {wrong} is installed, >=")
            assert "pip install" in why
        assert stack(**{name: good}) is None
    for name in (CUTEDSL.package, QUACK.package):
        del installed[name]
        assert stack() == f"{name} is not installed: pip install 'coda-inductor[cuda]'"


def test_stack_names_an_old_gpu(fresh_stack, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    assert "8.0 is not supported" in availability.kernel_stack().text
