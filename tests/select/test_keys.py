# SPDX-License-Identifier: Apache-2.0
"""The keys of the measurements that ship. Users' files have the same keys: if a key changes, their
measurements are lost. Each row's site is built again from the words of its key and has to get that
key. A table has no program's text, so most programs here are stand-ins that have only a key."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

from programs import kinds

from coda_inductor.program import EpilogueProgram
from coda_inductor.select.device import tables
from coda_inductor.select.figures import key_of
from coda_inductor.select.site import Site, site_from, site_text

_KEY = re.compile(
    r"(?P<program>\w{16}) (?P<rows>\d+)x(?P<n>\d+)x(?P<k>\d+) (?P<a>[km])(?P<b>[kn])"
    r"(?: terms=(?P<terms>\d+))?(?: copied=(?P<copied>[\d+]+))?"
    r"(?: groups=(?P<groups>\d+))?(?: of=(?P<each>\d+))?"
)
_PROGRAMS = {program.key: program for program in kinds().values()}


def site_of(row: dict) -> Site:
    """The site that ``row`` of a table is about."""
    words = _KEY.fullmatch(row["key"]).groupdict()
    number = {name: int(words[name] or 0) for name in ("n", "k", "terms", "groups", "each")}
    program = _PROGRAMS.get(words["program"]) or SimpleNamespace(key=words["program"])
    return Site(
        program, row["m"], number["n"], number["k"], max(1, number["terms"]),
        tuple(map(int, words["copied"].split("+"))) if words["copied"] else (),
        a_major=words["a"], b_major=words["b"], groups=number["groups"],
        rows=row["m"] // number["each"] if number["each"] else 0,
    )  # fmt: skip


ROWS = [row for gpu in tables(None).values() for row in json.loads(gpu.sites.read_text())["sites"]]


def test_each_shipped_row_has_the_key_of_its_site():
    assert len(ROWS) > 900
    keys = [row["key"] for row in ROWS]
    assert [key_of(site_of(row)) for row in ROWS] == keys


def test_a_site_keeps_its_key_in_files_and_messages():
    whole = [site for site in map(site_of, ROWS) if isinstance(site.program, EpilogueProgram)]
    assert len(whole) > 60
    for site in whole:
        text = json.dumps(site_text(site))
        assert key_of(site_from(json.loads(text))) == key_of(site)
