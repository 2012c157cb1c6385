# SPDX-License-Identifier: Apache-2.0
"""What a site is expected to take where nothing was measured. Constants are an H100's."""

import json
from dataclasses import replace

import pytest
from measured import site
from programs import E4M3, fp8, kinds, legal, parsed

from coda_inductor.gpu import H100, tables
from coda_inductor.select.choice import select
from coda_inductor.select.measurements import Measurements
from coda_inductor.select.roofline import (
    FURTHER_SUM_BYTES,
    IDLE,
    START_US,
    around_us,
    fused_us,
    product_us,
    products_us,
    table_traffic,
)
from coda_inductor.select.site import Site

M, N, K = 8448, 3840, 4096  # 10 waves of tiles, 20 for pairs
BYTES, LAUNCH = H100.bytes_per_us, H100.launch_us


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


def test_a_kernel_is_a_product_with_stores_hidden_and_loads_not():
    plain, loads = product_us(M, N, K, H100), 2 * M * N / BYTES
    assert fused_us(site("scale", M, N, K), H100) == pytest.approx(plain)
    assert fused_us(site("rms_partial", M, N, K), H100) == pytest.approx(plain + loads)
    pair = fused_us(site("swiglu_train", M, N, K), H100)
    assert pair == pytest.approx(2 * plain - START_US)
    short = fused_us(site("rms_partial", M, N, 64), H100)  # its stores take longer
    assert short == pytest.approx(START_US + 2 * loads + loads)
    m, n = 128 * 5, 192 * 53  # of 3 x 132 tiles 131 are none: what idles at the end shows in part
    one = fused_us(site("scale", m, n, K), H100)
    idle = 1 + IDLE * 131 / 265
    assert one - START_US == pytest.approx((product_us(m, n, K, H100) - START_US) * idle)


@pytest.mark.parametrize(("n", "processors"), [(16, 66), (192, 66), (193, 132)])
def test_no_kernel_is_faster_than_its_tiles_read(n, processors):
    """An adapter's product: cuBLAS reads by all processors."""
    k, m = 8192, 128 * 66
    read = 2 * (m + n) * k / BYTES
    assert product_us(m, n, k, H100) == pytest.approx(START_US + read)
    one = fused_us(site("scale", m, n, k), H100)
    assert one == pytest.approx(START_US + read * 132 / processors)


def test_a_sum_of_products_is_one_kernel_over_all_of_k_and_several_products():
    """Weights that are copied together are read and written."""
    joined = site("norm_bwd_joined", M, N, 2 * K)
    one = replace(joined, terms=1)
    assert fused_us(joined, H100) == fused_us(one, H100)
    assert products_us(joined, H100) == pytest.approx(2 * product_us(M, N, K, H100))
    assert around_us(joined, H100) - around_us(one, H100) == pytest.approx(2 * 2 * M * N / BYTES)
    copied = replace(one, copied=(K, K // 2, K // 2))
    copy = 2 * 2 * N * 2 * K / BYTES + LAUNCH
    assert fused_us(copied, H100) - fused_us(one, H100) == pytest.approx(copy)
    assert products_us(copied, H100) == sum(product_us(M, N, k, H100) for k in copied.copied)


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
    plain = parsed("bfloat16", "z:tile", "y mul acc z", "y")
    assert fused_us(long, gpu) == fused_us(replace(long, program=plain), gpu)


def test_a_layer_norms_gradient_stays_where_its_four_sums_cost_more_than_they_save():
    """ViT-L's fc1: 175 us on an H200, of which a kernel that runs anyway saves cuBLAS's 141."""
    program = parsed(
        "bfloat16", "x:tile w:row", "g mul acc w; gx mul g x; ax mul acc x", "g:float32 acc",
        "c1:g:row:add c2:gx:row:add db:acc:col:add dw:ax:col:add",
    )  # fmt: skip
    gpu = next(gpu for name, gpu in tables(None).items() if "H200" in name)
    norm = Site(program, 12608, 1024, 4096, after=frozenset({"out0"}))
    assert select(norm, gated=True, store=Measurements(gpu)).refusal.code == "expected-slower"
    two = replace(norm, program=replace(program, reduces=program.reduces[2:]))
    assert fused_us(norm, gpu) - fused_us(two, gpu) == pytest.approx(
        2 * FURTHER_SUM_BYTES * 12608 * 1024 / gpu.bytes_per_us
    )


def test_sums_of_what_is_stored_read_only_that():
    ours, others = (
        legal(parsed("bfloat16", "z:tile", "y mul acc z; t mul y z", "y", f"db:{value}:col:add"))
        for value in "yt"
    )
    apart = [around_us(Site(program, M, N, K), H100) for program in (others, ours)]
    assert apart[0] - apart[1] == pytest.approx(2 * M * N / BYTES)


SCALED = "y0 mul acc inv_a; y mul y0 inv_b"
VECTORS = "inv_a:col:float32 inv_b:row:float32 bias:row:bfloat16"


@pytest.mark.parametrize(("program", "bytes_moved", "launches"), [
    # The product and x are read once more for sums over M.
    (kinds()["norm_bwd"], 2 * 4 + 4, 2),
    (replace(kinds()["norm_bwd"], reduces=()), 2 * 4, 1),
    # cuBLAS has written a product that is stored as it is. A log-sum-exp is waited for.
    (kinds()["logsumexp"], 2 * 2, 2),
    (parsed("bfloat16", "", "", "acc", "part0:acc"), 2, 1),
    # Scales are its own work too; what is added to them is not.
    (parsed(E4M3, VECTORS, SCALED, "y:bfloat16"), 0, 0),
    (parsed(E4M3, VECTORS, f"{SCALED}; z add y bias", "z:bfloat16"), 4, 1),
])  # fmt: skip
def test_what_surrounds_a_product(program, bytes_moved, launches):
    expected = M * N * bytes_moved / BYTES + launches * LAUNCH
    assert around_us(Site(program, M, N, K), H100) == pytest.approx(expected)


def test_a_table_is_read_once_for_all_heads():
    program, plain = kinds()["rotary"], kinds()["scale"]
    assert table_traffic(program, 128) == 2 * 2
    assert table_traffic(program, 4096) == 2 * 2 * 128 / 4096
    heads, none = (around_us(Site(p, M, 4096, K), H100) for p in (program, plain))
    assert heads - none == pytest.approx(M * 128 * 2 * 2 / BYTES)


def test_what_is_fused_by_default():
    """Sites of a Llama in FP8. A rotation costs what it saves, as measured at 8B widths; where it
    wins, a measurement says so."""
    for name in ("fp8_residual", "fp8_swiglu", "fp8_dswiglu"):
        program = fp8()[name]
        found = select(Site(program, 8192, 14336, 4096), gated=True)
        assert (found.how, found.ground) == ("kernel", "roofline")
        half = replace(program, a_dtype="bfloat16", b_dtype="bfloat16", fast=False)
        twice = select(Site(half, 8192, 14336, 4096), gated=True)
        assert found.fused_us < 0.7 * twice.fused_us
    choice = select(Site(kinds()["rotary"], 8192, 4096, 3072), gated=True)
    assert (choice.how, choice.refusal.code) == ("unfused", "expected-slower")
