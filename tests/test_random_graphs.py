# SPDX-License-Identifier: Apache-2.0
"""Random graphs of GEMMs, norms, elementwise work and ops that cannot fuse: always eager's values.

What no one thought of writing down. Float64 and strict, so that neither a wrong rewrite nor an
exception of ours can hide. ``random_graphs`` writes the functions.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from checking import assert_same, differentiate, leave_custom_ops, randn
from harness import Harness
from random_graphs import SHAPES, D, blocks, freeze_some, model, soup

# A deep graph amplifies a difference in the last place; a wrong rewrite is off by 1.
TOLERANCE = {"forward": 1e-7, "backward": 1e-8}

expanded_or_not = pytest.mark.parametrize("custom", [False, True], ids=["expanded", "custom op"])
static_or_not = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def draw(write, seed, dynamic, custom):
    """A module with parameters, an input, and what drew them."""
    rng = random.Random(4 * seed + 2 * dynamic + custom)  # noqa: S311  no secret
    source = write(rng)
    print(source)  # noqa: T201  shown when the test fails
    return model(source), randn(*rng.choice(SHAPES), D), rng


@expanded_or_not
@static_or_not
@pytest.mark.parametrize("seed", range(6))
def test_random_graph(seed, dynamic, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    function, x, _ = draw(soup, seed, dynamic, custom)
    ours = Harness().run(function, x, dynamic=dynamic)
    with torch.no_grad():
        eager = function(x)
    assert_close(ours, eager, TOLERANCE["forward"])


@expanded_or_not
@static_or_not
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("write", [soup, blocks], ids=lambda f: f.__name__)
def test_random_training_graph(write, seed, dynamic, custom, monkeypatch):
    if custom:
        leave_custom_ops(monkeypatch, "64x32:1x1:co")
    function, x, rng = draw(write, seed, dynamic, custom)
    freeze_some(function, x, rng)
    ours, eager = copy.deepcopy((function, x)), copy.deepcopy((function, x))
    have = Harness().train(*ours, dynamic=dynamic)
    want = eager[0](eager[1])
    assert_close(have, want, TOLERANCE["backward"])
    if any(value.requires_grad for value in want):
        gradients = differentiate(have, ours), differentiate(want, eager)
        assert [g is None for g in gradients[0]] == [g is None for g in gradients[1]]
        assert_close(*gradients, TOLERANCE["backward"])


def assert_close(ours, eager, tolerance):
    """Beside 1, since what cancels to rounding noise has no relative error."""
    ours, eager = ([1.0 + v.detach() for v in values if v is not None] for values in (ours, eager))
    assert_same(ours, eager, tolerance)
