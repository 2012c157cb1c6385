# SPDX-License-Identifier: Apache-2.0
"""Made-up measurements, and GPU models that have some, for the tests."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from programs import B_MAJOR, TERMS, kinds

from coda_inductor.gpu import H100, Gpu, read
from coda_inductor.select.config import legal_configs
from coda_inductor.select.figures import Figures, key_of, to_row
from coda_inductor.select.site import Site

#: One that has no table, and of whose generation there is none either.
B200 = Gpu("NVIDIA B200", (10, 0), 148, 1e6)
#: A Hopper without any table at all.
HOPPER = Gpu("NVIDIA H900", (9, 0), 132, 1e6)


def site(kind: str = "scale", m: int = 8192, n: int = 2048, k: int = 2048, **others) -> Site:
    return Site(kinds()[kind], m, n, k, TERMS[kind], b_major=B_MAJOR[kind], name=kind, **others)


def configs(of: Site) -> list[str]:
    return [str(config) for config in legal_configs(of.program, of.arch, of.terms)]


def figures(us: Mapping[str, float], unfused: float = 100.0, plain: float = 80.0, **others):
    return Figures(dict(us), unfused, plain, **others)


def table(
    folder: Path,
    name: str = "NVIDIA H900",
    found: Mapping[str, Figures] | None = None,
    capability: tuple[int, int] = (9, 0),
) -> Gpu:
    """A table for the GPU ``name``, with an H100's constants and the sites ``found``; the GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.loads(H100.sites.read_text()) | {"device": name}
    data["constants"]["capability"] = capability
    data["sites"] = [to_row(key, figures) for key, figures in (found or {}).items()]
    path = folder / f"{replace(H100, name=name).file}.json"
    path.write_text(json.dumps(data))
    return read(path)


def borrowing(lender: Gpu, name: str = "NVIDIA H901") -> Gpu:
    """Another model of the generation of ``lender``, with the constants of that."""
    return replace(lender, name=name, sites=None)


def keyed(of: Site, found: Figures) -> dict[str, Figures]:
    return {key_of(of): found}
