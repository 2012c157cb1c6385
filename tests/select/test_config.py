# SPDX-License-Identifier: Apache-2.0
"""Configs: how they are written, and which are legal for a program."""

from dataclasses import replace

import pytest
from programs import fp8, heads, kinds, parsed, rotary

from coda_inductor.arch import ARCHS, HOPPER, arch_with
from coda_inductor.errors import KernelError
from coda_inductor.select.config import (
    Config,
    configs_in,
    epilogue_tile,
    legal_configs,
    mainloop_stages,
)

KINDS, FP8 = kinds(), fp8()
COMMON, RARE = configs_in(HOPPER.configs["common"]), configs_in(HOPPER.rare)


def sum_of_tiles(count: int, dtype: str = "float32"):
    names = ["acc", *(f"s{i}" for i in range(count))]
    steps = ";".join(f"s{i} add {names[i]} t{i}" for i in range(count))
    operands = " ".join(f"t{i}:tile:{dtype}" for i in range(count))
    return parsed("bfloat16", operands, steps, names[-1])


def test_each_config_has_one_text():
    every = COMMON + RARE
    assert len({str(config) for config in every}) == len(every)
    written = Config(64, 64, 1, 1, False, lean=True, dynamic=True)
    assert str(written) == "64x64:1x1:co:lean:dyn"
    for config in (*every, written):
        assert Config.parse(str(config)) == config
    for text in ("128x192", "128x192:2x1:xx", "128x192:2x1:pp:dyn:lean", "0128x192:2x1:pp"):
        with pytest.raises(KernelError, match=f"'{text}' is not"):
            Config.parse(text)


@pytest.mark.parametrize(("text", "why"), [
    ("128x152:2x1:pp", "multiples of 16 up to 208"),
    ("192x144:2x1:pp", "up to 128"),
    ("192x160:2x1:co:lean", "up to 0"),  # wrong sums
    ("320x128:2x1:co", "up to 0"),  # wrong for pairs
    ("128x128:4x2:pp", "at most 4"),
    ("256x144:2x1:co", None),
])  # fmt: skip
def test_what_hopper_has_no_kernel_for(text, why):
    found = Config.parse(text).tile_refusal(HOPPER)
    assert found is None if why is None else why in found


@pytest.mark.parametrize("name", [*KINDS, *FP8])
def test_what_is_legal_is_written_and_so_is_its_twin(name):
    legal = legal_configs((KINDS | FP8)[name])
    for config in legal:
        twin = config.dynamic_twin()
        assert config.tile_refusal(HOPPER) is twin.tile_refusal(HOPPER) is None
        assert Config.parse(str(twin)) == twin == twin.dynamic_twin() == replace(twin, dynamic=True)
        assert mainloop_stages((KINDS | FP8)[name], config) >= 2
    assert {c for c in legal if c.dynamic} <= {c.dynamic_twin() for c in legal if not c.dynamic}
    if name in KINDS:  # ties go to the first: they must not change when candidates are added
        order = [(*COMMON, *RARE).index(config) for config in legal]
        assert order == sorted(order)


def test_lean_epilogues_are_for_16_bit_tiles():
    for program in (sum_of_tiles(2, "bfloat16"), KINDS["rotary"]):
        assert {c.lean for c in legal_configs(program)} == {True, False}
    for program in (sum_of_tiles(2), rotary(128, tables="float32")):
        assert not any(c.lean for c in legal_configs(program))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", list(heads()))
def test_tiles_are_made_of_whole_heads(name, arch):
    program = heads()[name]
    for config in legal_configs(program, arch):
        assert config.tile_n % program.head == 0
        assert program.head % epilogue_tile(program, config, arch)[1] == 0
        assert not arch.two_ctas or config.cta_tile_m(arch) == 128


@pytest.mark.parametrize(("capability", "name", "casts"), [
    ((8, 0), "compute capability 8.0", False), ((8, 9), "compute capability 8.9", True),
    ((9, 0), "Hopper", True), ((11, 0), "data center Blackwell", True),
    ((12, 1), "consumer Blackwell", True), ((14, 0), "compute capability 14.0", True),
])  # fmt: skip
def test_which_generation_a_capability_is(capability, name, casts):
    """Also one of the future casts to FP8."""
    found = arch_with(capability)
    assert (found.name, "casts" in found.features) == (name, casts)
    assert found is arch_with(capability)
    assert found.runs == (found in ARCHS) == bool(legal_configs(KINDS["scale"], found))
