# SPDX-License-Identifier: Apache-2.0
"""Kernels of programs that know heads, on a GPU against the reference executor."""

from __future__ import annotations

import pytest
from oracle import ARCH, NEEDS_KERNELS, check
from programs import heads, inputs

from coda_inductor.select.config import Config, legal_configs

pytestmark = NEEDS_KERNELS

K = 136  # ragged, as are all M
NAMES = [name for name, p in heads().items() if legal_configs(p, ARCH)]
PROGRAMS = [("bfloat16", name) for name in NAMES]
PROGRAMS += [("float16", name) for name in ("rotary", "everything") if name in NAMES]
#: All configs of one way across columns, and some of the others.
STEPS = {"halves_64": 1, "halves_80": 1, "neighbours_in_part": 3, "everything": 3}
CONFIGS = [
    (name, str(config))
    for name, step in STEPS.items()
    for config in legal_configs(heads()[name], ARCH)[1::step]
]


@pytest.mark.parametrize(("dtype", "name"), PROGRAMS)
def test_program(dtype, name):
    program = heads(dtype)[name]
    for m, count in ((1, 3), (127, 1), (1021, 10)):
        check(program, *inputs(program, m, count * program.head, K, device="cuda"))


@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_config(name, config):
    program = heads()[name]
    arguments = inputs(program, 1000, 11 * program.head, 200, device="cuda")
    check(program, *arguments, Config.parse(config))
