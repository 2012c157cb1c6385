# SPDX-License-Identifier: Apache-2.0
"""How a config divides a site's work: what people are told of why it is the fastest."""

from __future__ import annotations

import pytest
from kinds import kinds

from coda_inductor.select.config import Config
from coda_inductor.select.device import H100
from coda_inductor.select.division import divide

SCALE, PAIR = kinds()["scale"], kinds()["swiglu"]


@pytest.mark.parametrize(
    ("config", "m", "n", "tiles", "waves", "last"),
    [
        ("128x128:1x1:pp", 128 * 12, 128 * 11, 132, 1, 1.0),
        ("128x128:1x1:pp", 128 * 12, 128 * 11 + 8, 144, 2, 12 / 132),
        ("128x128:1x1:pp", 1, 8, 1, 1, 1 / 132),
        # 66 clusters of two at a time; three rows of tiles are two clusters
        ("128x128:2x1:pp", 384, 128, 3, 1, 2 / 66),
        ("64x64:1x1:co:k4", 64, 64 * 66, 66, 2, 1.0),  # each tile four times
    ],
)
def test_tiles_waves_and_what_idles(config, m, n, tiles, waves, last):
    found = divide(SCALE, Config.parse(config), m, n, H100)
    assert (found.tiles, found.waves) == (tiles, waves)
    assert found.last == pytest.approx(last)


def test_a_pair_has_twice_the_columns():
    config = Config.parse("128x192:2x1:pp")
    assert divide(PAIR, config, 8192, 960, H100).tiles == 64 * 10
    assert divide(SCALE, config, 8192, 960, H100).tiles == 64 * 5


def test_in_words():
    config = Config.parse("128x128:1x1:pp")
    assert str(divide(SCALE, config, 1536, 1408, H100)).startswith(
        "132 tiles in 1 wave, 100 % full"
    )
    words = str(divide(SCALE, config, 8192, 4096, H100))
    assert words.startswith("2048 tiles in 16 waves, the last 52 % full; ")
    assert words.endswith(" steps of K in flight")
