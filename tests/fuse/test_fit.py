# SPDX-License-Identifier: Apache-2.0
"""What is too heavy for shared memory gives up its heaviest tile, and what reads it, alone."""

from __future__ import annotations

import pytest
import torch
from checking import check, randn

from coda_inductor.options import parse
from coda_inductor.plan import Plan
from coda_inductor.program import EpilogueProgram, Operand, Step, Store
from coda_inductor.program.dtypes import WIDTHS
from coda_inductor.select.site import Site

D, HIDDEN = 16, 24


def function(x, w, narrow, wide):
    y = x @ w + narrow  # a residual, then something that reads a wider tile
    return y, (y * wide).sum(-1)


def stores(x, w, *_):
    y = x @ w
    return torch.sigmoid(y), torch.exp(torch.sin(y)), torch.tanh(y)


def arguments(dtype):
    wide = {torch.bfloat16: torch.float32}.get(dtype, dtype)
    tensors = randn(6, D), randn(D, HIDDEN), randn(6, HIDDEN), randn(6, HIDDEN)
    return [t.to(dtype) for t in tensors[:3]] + [tensors[3].to(wide)]


@pytest.fixture
def room(monkeypatch):
    """Let kernels have so many bytes of tiles an element, on any device."""

    def limit(bytes_):
        def fits(_self, site, _a):
            program = site.program
            return sum(WIDTHS[t.dtype] for t in (*program.loads, *program.stores)) <= bytes_

        monkeypatch.setattr(Plan, "fits", fits)

    return limit


@pytest.mark.parametrize(
    ("bytes_", "absorbed", "cut"),
    [(8, ("add", "mul", "sum"), 0), (7, ("add",), 1), (4, ("add",), 1), (3, (), 2)],
)
def test_the_heaviest_tile_leaves_first(bytes_, absorbed, cut, room):
    room(bytes_)
    harness = check(function, *arguments(torch.bfloat16))
    (site,) = harness.report.sites
    assert (site.absorbed if site.fused else ()) == absorbed
    codes = [stop.code for stop in site.stops] if site.fused else [site.refusal.code]
    assert ("shared-memory" in codes) == (cut > 0)


@pytest.mark.parametrize("bytes_", [24, 16])
def test_without_tiles_to_load_the_last_store_leaves(bytes_, room):
    room(bytes_)
    check(function, *arguments(torch.float64))
    harness = check(stores, *arguments(torch.float64))
    (site,) = harness.report.sites
    assert len(site.program.stores) == bytes_ // 8
    assert ("shared-memory" in [stop.code for stop in site.stops]) == (bytes_ < 24)


@pytest.mark.parametrize(
    ("how", "fast", "fits"),
    [
        ({"as_if": torch.device("cuda", 0)}, False, False),
        ({"as_if": torch.device("cuda", 0)}, True, True),
        ({"dry": True}, False, False),
        ({}, False, True),  # plain ops have no such limit
    ],
)
def test_only_kernels_have_a_limit(how, fast, fits):
    """An FP8 product beside a float32 stream and two more gradients, on an H100."""
    tiles = [
        Operand(f"t{i}", "tile", dtype) for i, dtype in enumerate(["bfloat16"] * 2 + ["float32"])
    ]
    added = [Step(f"v{i}", "add", (f"v{i - 1}" if i else "acc", f"t{i}")) for i in range(3)]
    program = EpilogueProgram(
        ("acc",), "float8_e4m3fn", tuple(tiles), tuple(added),
        (Store("out0", "v2", "float32"), Store("out1", "v1", "bfloat16")), fast=fast,
    )  # fmt: skip
    site = Site(program, 4096, 4096, 4096)
    assert Plan(parse(None, {}), **how).fits(site, torch.empty(0)) == fits
