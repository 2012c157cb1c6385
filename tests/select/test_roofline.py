# SPDX-License-Identifier: Apache-2.0
"""What a site is expected to take where nothing was measured. Constants are an H100's."""

import json

import pytest
from programs import fp8, kinds, parsed

from coda_inductor.gpu import tables
from coda_inductor.select.choice import select
from coda_inductor.select.measurements import Measurements
from coda_inductor.select.roofline import fused_us, product_us
from coda_inductor.select.site import Site


def test_products_of_what_was_measured_take_about_as_long():
    errors = []
    for gpu in tables(None).values():
        for row in json.loads(gpu.sites.read_text())["sites"]:
            like, size = row["like"].split(), row["key"].split(" ")[1]
            if like[:2] == ["1", "bfloat16"] and "=" not in row["key"]:
                n, k = map(int, size.split("x")[1:])
                errors.append(product_us(row["m"], n, k, gpu) / row["plain"] - 1)
    errors.sort()
    assert len(errors) > 300
    assert abs(errors[len(errors) // 2]) < 0.05
    assert -0.25 < errors[len(errors) // 20] < errors[-len(errors) // 20] < 0.25


GELU_BACKWARD = (
    "s mul z 0.7071; e erf s; e1 add e 1.0; phi mul e1 0.5; zz mul z z; h mul zz -0.5; x exp h;"
    "p mul x 0.3989; zp mul z p; slope add phi zp; y mul acc slope"
)


def test_arithmetic_hides_behind_the_next_tile_where_that_takes_longer():
    """ViT-L's gradient of exact GELU was slower than cuBLAS and a kernel: 295 us on an H200."""
    program = parsed("bfloat16", "z:tile", GELU_BACKWARD, "y")
    short, long = (Site(program, 12608, 4096, k) for k in (1024, 4096))
    gpu = next(gpu for name, gpu in tables(None).items() if "H200" in name)
    assert fused_us(short, gpu) == pytest.approx(295, rel=0.05)
    for at, how in ((short, "unfused"), (long, "kernel")):
        assert select(at, gated=True, store=Measurements(gpu)).how == how


def test_a_layer_norms_gradient_stays_where_its_four_sums_cost_more_than_they_save():
    """ViT-L's fc1: 175 us on an H200, of which a kernel that runs anyway saves cuBLAS's 141."""
    program = parsed(
        "bfloat16", "x:tile w:row", "g mul acc w; gx mul g x; ax mul acc x", "g:float32 acc",
        "c1:g:row:add c2:gx:row:add db:acc:col:add dw:ax:col:add",
    )  # fmt: skip
    gpu = next(gpu for name, gpu in tables(None).items() if "H200" in name)
    norm = Site(program, 12608, 1024, 4096, after=frozenset({"out0"}))
    assert select(norm, gated=True, store=Measurements(gpu)).refusal.code == "expected-slower"


def test_what_is_fused_by_default():
    """Sites of a Llama in FP8. A rotation costs what it saves, as measured at 8B widths; where it
    wins, a measurement says so."""
    for name in ("fp8_residual", "fp8_swiglu", "fp8_dswiglu"):
        program = fp8()[name]
        found = select(Site(program, 8192, 14336, 4096), gated=True)
        assert (found.how, found.ground) == ("kernel", "roofline")
    choice = select(Site(kinds()["rotary"], 8192, 4096, 3072), gated=True)
    assert (choice.how, choice.refusal.code) == ("unfused", "expected-slower")
