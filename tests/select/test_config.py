# SPDX-License-Identifier: Apache-2.0
"""Configs: how they are written, and which are legal for a program."""

from dataclasses import replace

import pytest
import torch
from programs import fp8, heads, kinds, parsed, rotary

from coda_inductor.arch import ARCHS, HOPPER
from coda_inductor.errors import KernelError
from coda_inductor.select.choice import select
from coda_inductor.select.config import (
    Config,
    configs_in,
    epilogue_tile,
    legal_configs,
    mainloop_stages,
)
from coda_inductor.select.site import Site

KINDS, FP8 = kinds(), fp8()
COMMON, RARE = configs_in(HOPPER.configs["common"]), configs_in(HOPPER.rare)


def sum_of_tiles(count: int, dtype: str = "float32"):
    names = ["acc", *(f"s{i}" for i in range(count))]
    steps = ";".join(f"s{i} add {names[i]} t{i}" for i in range(count))
    operands = " ".join(f"t{i}:tile:{dtype}" for i in range(count))
    return parsed("bfloat16", operands, steps, names[-1])


MODES = {
    "128x192:2x1:pp": Config(128, 192, 2, 1, True),
    "128x192:2x1:pp:lean": Config(128, 192, 2, 1, True, lean=True),
    "128x192:2x1:pp:dyn": Config(128, 192, 2, 1, True, dynamic=True),
    "64x64:1x1:co:lean:dyn": Config(64, 64, 1, 1, False, True, True),
}


def test_each_config_has_one_text():
    every = COMMON + RARE
    assert len({str(config) for config in every}) == len(every)
    for config in (*every, *MODES.values()):
        assert Config.parse(str(config)) == config
    assert [*map(str, MODES.values())] == [*MODES]
    for text in (
        "128x192", "128x192:2x1:xx", "128x192:2x1:pp:dyn:lean", "128x192:2x1:pp:np",
        "128x192:2x1:pp:sw4", "128x192:2x1:pp:k2", "0128x192:2x1:pp",
    ):  # fmt: skip
        with pytest.raises(KernelError, match=f"'{text}' is not"):
            Config.parse(text)


@pytest.mark.parametrize(("text", "why"), [
    ("128x152:2x1:pp", "multiples of 16 up to 208"),
    ("128x224:2x1:pp", "up to 208"),
    ("192x144:2x1:pp", "up to 128"),
    ("192x160:2x1:co:lean", "up to 0"),  # wrong sums
    ("320x128:2x1:co", "up to 0"),  # wrong for pairs
    ("256x224:2x1:co", "up to 208"),
    ("128x128:4x2:pp", "at most 4"),
    ("128x128:2x1:co:dyn", None),
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


def test_lean_epilogues_are_for_16_bit_tiles_and_leave_more_to_the_main_loop():
    for program in (sum_of_tiles(2, "bfloat16"), KINDS["rotary"]):
        assert {c.lean for c in legal_configs(program)} == {True, False}
    for program in (sum_of_tiles(0), sum_of_tiles(2), rotary(128, tables="float32")):
        assert not any(c.lean for c in legal_configs(program))
    config = Config(128, 192, 2, 1, True)
    for name in ("dswiglu", "norm_bwd"):
        stages = [mainloop_stages(KINDS[name], replace(config, lean=lean)) for lean in (0, 1)]
        assert stages[1] == stages[0] + 1


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", list(heads()))
def test_tiles_are_made_of_whole_heads(name, arch):
    program = heads()[name]
    for config in legal_configs(program, arch):
        assert config.tile_n % program.head == 0
        assert program.head % epilogue_tile(program, config, arch)[1] == 0
        assert not arch.two_ctas or config.cta_tile_m(arch) == 128


def test_tables_take_the_shared_memory_of_tiles():
    program = KINDS["rotary"]
    config = legal_configs(program)[0]
    tiles = tuple(replace(o, kind="tile") for o in program.loads)
    stages = mainloop_stages(program, config)
    assert stages == mainloop_stages(replace(program, operands=tiles, head=0), config)
    assert stages < mainloop_stages(KINDS["scale"], config)


def test_symbolic_rows_are_chosen_by_their_hint():
    """Few rows want small tiles, many want large ones."""
    seen = []

    def backend(graph, example_inputs):
        rows, _ = (x for x in example_inputs if isinstance(x, torch.SymInt))
        seen.append(select(Site(KINDS["scale"], rows, 4096, 4096), gated=False))
        return graph.forward

    for rows in (64, 2048):
        torch._dynamo.reset()
        torch.compile(lambda x: x + x.shape[0], backend=backend, dynamic=True)(torch.ones(rows, 4))
    few, many = seen
    assert few.config != many.config
