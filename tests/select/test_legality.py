# SPDX-License-Identifier: Apache-2.0
"""Reasons for having no kernel: of a site, of a matrix, of a machine."""

import importlib.metadata
from dataclasses import replace

import pytest
import torch
from programs import E5M2, activated, fp8, grouped, heads, kinds, one_op, parsed, programs, rotary
from test_config import sum_of_tiles

from coda_inductor.arch import arch_with
from coda_inductor.mainloop import availability
from coda_inductor.mainloop.environment import CUTEDSL, QUACK
from coda_inductor.program import Store
from coda_inductor.select import legality
from coda_inductor.select.config import legal_configs
from coda_inductor.select.site import Site

SCALE, PAIR, ROTARY = (kinds()[name] for name in ("scale", "swiglu", "rotary"))
EXPERTS = grouped()["experts_down"]
FP8 = activated()


def unsupported(program, n=4096, k=4096, major=9, **how):
    return Site(program, 4096, n, k, arch=arch_with((major, 0)), **how).refusal


@pytest.mark.parametrize("program", [*programs().values(), *fp8().values(), one_op("tanh")])
def test_every_representative_program_is_supported(program):
    assert unsupported(program) is None


@pytest.mark.parametrize(("program", "n", "k", "how", "code", "text"), [
    (parsed("float32", "", "", "acc"), 64, 64, {}, "kernel-dtype", "float32 GEMM"),
    (SCALE, 60, 64, {}, "not-multiple-of-8", "N=60"),
    (SCALE, 64, 0, {}, "not-multiple-of-8", "K=0"),
    (replace(SCALE, stores=()), 64, 64, {}, "kernel-form", "without a tile store"),
    (replace(SCALE, stores=(Store("o", "x", "float64"),)), 64, 64, {}, "kernel-dtype", "float64"),
    (replace(PAIR, stores=(Store("o", "y", "float32"),)), 64, 64, {}, "paired-store-wide",
     "16-bit"),
    (PAIR, 64, 64, {"b_major": "n"}, "paired-weight-layout", "K-major"),
    (parsed("bfloat16", "s:scalar:float32", "x neg s", "x"), 64, 64, {}, "kernel-form",
     "one value"),
    (sum_of_tiles(16), 4096, 4096, {}, "shared-memory", "shared memory"),
    (FP8, 64, 72, {}, "not-multiple-of-16", "N=64 and K=72"),
    (FP8, 64, 64, {"a_major": "m"}, "fp8-layout", "left operand is contiguous along M"),
    (FP8, 64, 64, {"b_major": "n"}, "fp8-layout", "right operand is contiguous along N"),
    (EXPERTS, 64, 64, {"a_major": "m"}, "kernel-form", "contiguous"),
    (FP8, 64, 64, {"terms": 2}, "kernel-form", "a sum of 2 FP8 products"),
    (ROTARY, 1096, 1024, {}, "kernel-form", "N=1096 is not a multiple of a head's 128"),
    (rotary(112), 1120, 1024, {}, "kernel-form", "no kernel has tiles of whole heads of 112"),
    (rotary(80, tables="float32"), 1280, 1024, {}, "kernel-form", "heads of 80"),
    (rotary(96, 24), 1536, 1024, {}, "kernel-form", "columns at distance 12"),
    (rotary(64, 64, 2), 1024, 1024, {}, "kernel-form",
     "distance 2: kernels support 1 and multip"),
])  # fmt: skip
def test_reasons(program, n, k, how, code, text):
    why = unsupported(program, n, k, **how)
    assert (why.code, why.failure) == (code, True)
    assert text in why.text


MIXED = replace(FP8, a_dtype=E5M2)


@pytest.mark.parametrize(("program", "arch", "code"), [
    (SCALE, 8, "old-gpu"), (SCALE, 13, "old-gpu"),
    (MIXED, 9, None), (MIXED, 10, "fp8-mixed"), (MIXED, 12, None),
    (EXPERTS, 9, None), (EXPERTS, 10, "kernel-form"), (EXPERTS, 12, "kernel-form"),
])  # fmt: skip
def test_what_has_no_kernel_on_a_generation(program, arch, code):
    why = unsupported(program, 64, 64, arch)
    assert (why and why.code) == code
    assert code != "old-gpu" or legal_configs(program, arch_with((arch, 0))) == ()


#: Heads that have no kernel on a generation, and why.
WITHOUT = {
    9: {},
    10: dict.fromkeys(("halves_80", "halves_96", "part_of_80"), "tiles"),
    12: {
        "halves_80": "distance 40", "part_of_80": "distance 16", "halves_96": "distance 48",
        "part_of_64": "distance 8", "halves_256": "tiles",
    },
}  # fmt: skip


@pytest.mark.parametrize("arch", WITHOUT)
def test_which_heads_have_kernels(arch):
    for name, program in heads().items():
        why = unsupported(program, 10 * program.head, 1024, arch)
        wanted = WITHOUT[arch].get(name)
        assert (why is None) == (wanted is None), name
        assert why is None or wanted in why.text


def test_a_matrix_that_tma_cannot_read_where_it_lies():
    """Parameters in one flat buffer, columns of a wider matrix."""
    flat = torch.empty(64 * 72, dtype=torch.bfloat16)
    weight = flat[: 64 * 64].view(64, 64)
    fine = (weight, weight.t(), flat[8 : 8 + 64].view(1, 64), weight[:, :1].expand(64, 8))
    assert [legality.unaligned("w", x) for x in fine] == [None] * 4
    shifted = flat[1 : 1 + 64 * 64].view(64, 64)
    wide = torch.empty(8, 68, dtype=torch.bfloat16)[:, :64]
    assert {legality.unaligned("w", x).code for x in (shifted, wide)} == {"unaligned"}


@pytest.fixture
def stack(monkeypatch):
    """Why no kernel runs on a GPU of a capability, with some versions of the libraries."""

    def why(capability=(9, 0), **installed) -> str | None:
        availability.library_stack.cache_clear()
        availability.kernel_stack.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        found = {QUACK.package: "0.6.5", CUTEDSL.package: "4.8.1"} | installed
        found = {name: version for name, version in found.items() if version}

        def version(name):
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        found = availability.kernel_stack()
        return found and found.text

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield why
    availability.library_stack.cache_clear()
    availability.kernel_stack.cache_clear()


def test_what_keeps_kernels_from_running_here(stack):
    pytest.importorskip("quack")
    assert stack() is None
    assert "8.0 is not supported" in stack((8, 0))
    for name, good, bad in (
        (QUACK.package, "0.6.9", ("0.6.4", "0.6.5rc1", "0.7.0.dev1")),
        (CUTEDSL.package, "4.8.0", ("4.7.9", "4.10")),
    ):
        assert stack(**{name: good}) is None
        for wrong in bad:
            assert stack(**{name: wrong}).startswith(f"{name} {wrong} is installed, >=")
        assert stack(**{name: ""}).startswith(f"{name} is not installed: pip install ")
