# SPDX-License-Identifier: Apache-2.0
"""What a site is expected to take where nothing was measured. Constants are an H100's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from measured import site
from programs import kinds

from coda_inductor.select.device import H100, tables
from coda_inductor.select.roofline import (
    IDLE,
    START_US,
    around_us,
    fused_us,
    product_us,
    products_us,
)
from coda_inductor.select.site import Site

M, N, K = 8448, 3840, 4096  # 10 waves of tiles, 20 for pairs
BYTES = H100.bytes_per_us


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
    plain = product_us(M, N, K, H100)
    assert fused_us(site("scale", M, N, K), H100) == pytest.approx(plain)
    loads = 2 * M * N / BYTES
    assert fused_us(site("rms_partial", M, N, K), H100) == pytest.approx(plain + loads)
    pair = fused_us(site("swiglu_train", M, N, K), H100)
    assert pair == pytest.approx(2 * plain - START_US)
    short = fused_us(site("rms_partial", M, N, 64), H100)  # its stores take longer
    assert short == pytest.approx(START_US + 2 * loads + loads)


def test_what_idles_at_the_end_shows_in_part():
    """Of 2 x 132 tiles 131 are none."""
    m, n = 128, 192 * 133
    one = fused_us(site("scale", m, n, K), H100)
    idle = 1 + IDLE * 131 / 133
    assert one - START_US == pytest.approx((product_us(m, n, K, H100) - START_US) * idle)


def test_a_sum_of_products_is_one_kernel_over_all_of_k_and_several_products():
    joined = site("norm_bwd_joined", M, N, 2 * K)
    one = replace(joined, terms=1)
    assert fused_us(joined, H100) == fused_us(one, H100)
    assert products_us(joined, H100) == pytest.approx(2 * product_us(M, N, K, H100))
    assert around_us(joined, H100) - around_us(one, H100) == pytest.approx(2 * 2 * M * N / BYTES)


def test_weights_that_are_copied_together_are_read_and_written():
    one = site("norm_bwd", M, N, 3072)
    sums = replace(one, copied=(2048, 512, 512))
    copy = 2 * 2 * N * 3072 / BYTES + H100.launch_us
    assert fused_us(sums, H100) - fused_us(one, H100) == pytest.approx(copy)
    assert products_us(sums, H100) == sum(product_us(M, N, k, H100) for k in sums.copied)


def test_sums_over_m_are_a_second_kernel():
    """It reads the product and x once more."""
    both = kinds()["norm_bwd"]
    alone, summed = (around_us(Site(p, M, N, K), H100) for p in (replace(both, reduces=()), both))
    assert summed - alone == pytest.approx(4 * M * N / BYTES + H100.launch_us)


def test_a_product_stored_as_it_is_is_not_charged_as_a_kernels_store():
    """CuBLAS has written it already: what is left to save is one reading, and another one where
    all else waits for what the first computes."""
    reading = 2 * M * N / BYTES + H100.launch_us
    head = kinds()["logsumexp"]
    total = replace(head, reduces=(replace(head.reduces[0], combine="add"),))
    for program, times in ((total, 1), (head, 2)):
        assert around_us(Site(program, M, N, K), H100) == pytest.approx(times * reading)
