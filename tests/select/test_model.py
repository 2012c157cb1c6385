# SPDX-License-Identifier: Apache-2.0
"""What the cost model's word rests on: measurements, sizes like the measured ones, or nothing."""

import pytest

from coda_inductor.select.choice import choose, select
from coda_inductor.select.kinds import TERMS, kinds
from coda_inductor.select.model import ground, kernel_us, table
from coda_inductor.select.site import Site


def of(kind, m, n, k):
    program = kinds()[kind]
    return ground(program, choose(program, m, n, k), m, n, k)


def test_measured_shapes_are_measured():
    for row in table()["shapes"]:
        program, terms = kinds()[row["kind"]], TERMS[row["kind"]]
        size = row["m"], row["n"], row["k"]
        assert ground(program, choose(program, *size, terms=terms), *size, terms) == "measured"


@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [
        ("scale", (8192, 2048, 3072), "modelled"),
        ("scale", (512, 512, 512), "smaller"),  # K
        ("scale", (128, 4096, 3072), "smaller"),  # M
        ("swiglu", (512, 1408, 2048), "smaller"),  # N: pairs were measured from 8192 on
        ("swiglu", (8192, 8192, 3072), "modelled"),
        ("scale", (65536, 4096, 3072), "larger"),
        ("logsumexp", (8192, 65536, 2048), "modelled"),
        ("logsumexp", (8192, 8192, 2048), "smaller"),
    ],
)
def test_sizes_are_compared_with_the_measured_ones_of_the_family(kind, size, said):
    assert of(kind, *size) == said


def test_plain_products_have_a_ground_too():
    assert ground(None, None, 8192, 2048, 2048) == "measured"
    assert ground(None, None, 8192, 2560, 2560) == "modelled"
    assert ground(None, None, 512, 512, 512) == "smaller"


def test_below_what_was_measured_the_number_means_nothing():
    """The same for N of 512 and 1408, and less for two products than for one of the same size: what
    is left of it is a constant that was fitted to large sizes."""
    pair, single = kinds()["swiglu"], kinds()["scale"]
    times = [kernel_us(pair, choose(pair, 512, n, 512), 512, n, 512) for n in (512, 1408)]
    assert times[0] == times[1]
    assert times[0] < kernel_us(single, choose(single, 512, 512, 512), 512, 512, 512)
    for n in (512, 1408):
        assert of("swiglu", 512, n, 512) == "smaller"


def test_a_refusal_by_numbers_without_ground_says_so():
    guessed = select(Site(kinds()["scale"], 128, 4096, 3072), gated=True)
    assert guessed.refusal.code == "expected-slower"
    assert "a guess: smaller than anything measured" in guessed.refusal.text
    sure = select(Site(kinds()["scale"], 512, 1024, 4096), gated=True)
    assert sure.refusal.code == "expected-slower"
    assert "measured" not in sure.refusal.text
