# SPDX-License-Identifier: Apache-2.0
"""Masks of dropout are Philox's, as probable and as independent as they should be; gradients are
those of plain torch with the same masks."""

import itertools

import pytest
import torch
from checking import randn
from torch.utils.flop_counter import FlopCounterMode

from coda_inductor.memory import costs
from coda_inductor.semantic.dropout import DRAWS, FORWARD, keep_mask, scale

M, K, SIGMAS = 512, 768, 5


def test_draws_are_philox():
    """The first answer for 7 rounds of Random123's own test: a counter and a key of zeros."""
    words = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    halves = [half for word in words for half in (word % DRAWS, word // DRAWS)]
    for i, draw in enumerate(halves):
        one, next_one = (keep_mask(torch.zeros(1, dtype=torch.int64), 0, 1, 8, p / DRAWS)
                         for p in (draw, draw + 1))  # fmt: skip
        assert (bool(one[0, i]), bool(next_one[0, i])) == (True, False)


def test_masks_are_as_probable_and_independent_as_they_should_be():
    """Of steps (seeds), of adapters (numbers), of rows and of columns, near ones and far ones."""
    p = 0.05
    seeds = [torch.tensor([number]) for number in (0, 1, -1, 2**62)]
    masks = [keep_mask(seed, i, M, K, p).double() for seed in seeds for i in (0, 1, 7)]
    spread = p * (1 - p) / (M * K) ** 0.5
    centered = [mask - 1 + p for mask in masks]
    for mask, one in zip(masks, centered, strict=True):
        assert abs(mask.mean() - 1 / scale(p)) < SIGMAS * (p * (1 - p) / (M * K)) ** 0.5
        for dim, by in itertools.product((0, 1), (1, 2, 3, 4, 8, 64, 256)):
            assert abs((one * one.roll(by, dim)).mean()) < SIGMAS * spread
        assert mask.std(0).min() > 0 < mask.std(1).min()
    for one, other in itertools.combinations(centered, 2):
        assert abs((one * other).mean()) < SIGMAS * spread


def test_a_part_has_the_mask_of_the_whole():
    seed = torch.tensor([3])
    assert keep_mask(seed, 2, M, K, 0.3)[:5, :13].equal(keep_mask(seed, 2, 5, 13, 0.3))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_the_same_masks(needs):
    """They are summed as float64 sums them, so that this compares all of the definition."""
    seed, p, count = torch.tensor([5]), 0.3, 3
    x, weight = randn(2, 5, 24), randn(count * 4, 24)
    dt = randn(2, 5, count * 4)
    found = []
    for ours in (True, False):
        given = [t.clone().requires_grad_(need) for t, need in zip((x, weight), needs, strict=True)]
        if ours:
            t = FORWARD(*given, seed, 4, count, p)
        else:
            masks = [keep_mask(seed, 4 + i, 10, 24, p).view(x.shape) for i in range(count)]
            parts = zip(masks, given[1].chunk(count), strict=True)
            t = torch.cat([given[0] * mask * scale(p) @ part.t() for mask, part in parts], -1)
        t.backward(dt)
        found.append((t, *(each.grad for each in given if each.requires_grad)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_each_product_counts():
    costs.install()
    x, weight = randn(6, 24).requires_grad_(), randn(8, 24).requires_grad_()
    with FlopCounterMode(display=False) as mode:
        FORWARD(x, weight, torch.tensor([5]), 0, 2, 0.5).sum().backward()
    assert mode.get_total_flops() == 3 * 2 * 6 * 24 * 8
