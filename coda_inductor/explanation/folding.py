# SPDX-License-Identifier: Apache-2.0
"""Identical layers are one row: what happens in layer 3 happens in layer 4, and is said once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from coda_inductor.explanation.block import split
from coda_inductor.report import SiteReport


@dataclass(frozen=True)
class Row:
    """Sites that differ in nothing but the layer. ``name`` has ``*`` in place of its number."""

    name: str
    sites: tuple[SiteReport, ...]
    layers: str = ""

    @property
    def site(self) -> SiteReport:
        return self.sites[0]

    @property
    def times(self) -> int:
        return len(self.sites)


def fold(sites: Sequence[SiteReport]) -> list[Row]:
    """Rows in the order of their first site, without weight gradients that have no work."""
    groups: dict[Hashable, list[SiteReport]] = {}
    for site in (site for site in sites if not site.idle):
        same = (
            general_path(site.site), str(site.shape), site.role, site.how, site.patterns,
            site.absorbed, site.refusal and site.refusal.code, site.bytes_before, site.bytes_after,
            site.program.key if site.program else None,
        )  # fmt: skip
        groups.setdefault(same, []).append(site)
    rows = []
    for found in groups.values():
        name = found[0].site if len(found) == 1 else general_path(found[0].site)
        indices = [split(site.site.split(" + ")[0])[1] for site in found]
        rows.append(Row(name, tuple(found), ", ".join(str(i) for i in indices if i is not None)))
    return rows


def general_path(path: str) -> str:
    """``model.layers.*.mlp.up_proj`` for ``model.layers.3.mlp.up_proj``; pairs name two modules.
    A path that is nothing but a number stays."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", path, count=1)
