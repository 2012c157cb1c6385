# SPDX-License-Identifier: Apache-2.0
"""A site whose program nobody measured, at a size where another one of its kind was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from measured import figures, site

from coda_inductor.program import Step
from coda_inductor.select.choice import select
from coda_inductor.select.device import H100
from coda_inductor.select.figures import key_of, to_row
from coda_inductor.select.kinds import kinds
from coda_inductor.select.store import Store

M, N, K = 4096, 2048, 1024


def spelled(name: str, op: str = "neg"):
    """The program of a kind with one step more, as another torch may spell it."""
    program = kinds()[name]
    first, *others = program.stores
    steps = (*program.steps, Step("more", op, (first.value,)))
    return replace(program, steps=steps, stores=(replace(first, value="more"), *others))


@pytest.fixture
def shipped(tmp_path):
    """A store whose table has these figures, by site."""

    def make(rows):
        table = tmp_path / f"table{len(list(tmp_path.iterdir()))}.json"
        rows = [to_row(key_of(where), found) for where, found in rows]
        table.write_text(json.dumps({"sites": rows}))
        return Store(replace(H100, sites=table), tmp_path / "own")

    return make


def at(program, m=M, n=N, k=K):
    return replace(site("dswiglu", m, n, k), program=program)


def test_another_spelling_is_found_and_says_so(shipped):
    found = figures({"128x128:2x1:pp": 40.0}, kind="dswiglu")
    store = shipped([(at(kinds()["dswiglu"]), found)])
    other = at(spelled("dswiglu"))
    assert key_of(other) != key_of(at(kinds()["dswiglu"]))
    assert store.find(at(kinds()["dswiglu"])) == (found, "shipped")
    assert store.find(other) == (found, "measured")
    choice = select(other, gated=True, store=store)
    assert (choice.config, choice.ground) == ("128x128:2x1:pp", "measured")
    assert not choice.measured


@pytest.mark.parametrize(
    "other",
    [at(spelled("act_bwd")), at(spelled("dswiglu"), n=2 * N), at(spelled("dswiglu"), m=2 * M)],
    ids=["kind", "N", "rows"],
)
def test_another_kind_or_size_is_not(shipped, other):
    store = shipped([(at(kinds()["dswiglu"]), figures({"128x128:2x1:pp": 40.0}, kind="dswiglu"))])
    assert store.find(other) is None


def test_of_several_the_slower_counts(shipped):
    quick = figures({"128x128:2x1:pp": 40.0}, kind="dswiglu")
    slow = figures({"128x128:2x1:pp": 44.0}, kind="dswiglu")
    for rows in ((quick, slow), (slow, quick)):
        sites = (at(kinds()["dswiglu"]), at(spelled("dswiglu")))
        store = shipped(list(zip(sites, rows, strict=True)))
        assert store.find(at(spelled("dswiglu", "abs"))) == (slow, "measured")
