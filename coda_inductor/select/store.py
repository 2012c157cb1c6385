# SPDX-License-Identifier: Apache-2.0
"""Where measurements are kept: one readable file for each GPU model, a line a site.

Those of this user are in ``<cache>/measured/<GPU>-<versions>.json``; the shipped ones are in the
tables under ``select/tables``, and a folder that ``CODA_CACHE_DIR`` names and that can only be read
is looked into as well. Files are replaced as a whole, under a lock (``locks``), and never
trusted: a line that is no measurement is skipped. Beside them, ``<GPU>-<versions>.left`` has the
sites that a graph was compiled without a measurement of, for ``python -m coda_inductor tune``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from coda_inductor.cache_dir import cache_dir, folder, prewarmed, write
from coda_inductor.codegen.render import RENDERER_VERSION
from coda_inductor.graph.sizes import hint
from coda_inductor.log import logger
from coda_inductor.mainloop.environment import label
from coda_inductor.select.device import Gpu
from coda_inductor.select.figures import Figures, from_row, key_of, signature, to_row
from coda_inductor.select.site import Site, site_from, site_text

FOLDER = "measured"
_FORMAT = 1
_GENERATION = "generation"


class Store:
    """All measurements for ``gpu``: this user's, and those that are shipped.

    Attributes:
        path: the file of this user's.
    """

    def __init__(self, gpu: Gpu, base: Path | None = None):
        name = f"{gpu.file}-{versions()}.json"
        self.path = (folder(FOLDER) if base is None else base) / name
        self.gpu = gpu
        self._stamp: tuple[int, int] | None = None
        self._own: dict[str, Figures] = {}
        self._others = {} if gpu.sites is None else dict(_shipped_sites(gpu.sites))
        if base is None and (read_only := prewarmed()) is not None:
            self._others |= sites_in(read_only / FOLDER / name)
        self._by_signature: dict[str, list[tuple[str, Figures]]] = {}
        for row in self._others.items():
            if row[1].like and row[1].us:
                self._by_signature.setdefault(row[1].like, []).append(row)

    def find(self, site: Site) -> tuple[Figures, str] | None:
        """What was measured of ``site``, and where: "here" (by this user) or "shipped". That may be
        of another program that is alike (``figures.signature``); of several the slowest counts."""
        self._refresh()
        key = key_of(site)
        if (own := self._own.get(key)) is not None:
            return own, "here"
        if (other := self._others.get(key)) is not None:
            return other, "shipped"
        place = key.partition(" ")[2]
        at = [found for name, found in self._alike(site) if name.partition(" ")[2] == place]
        return (max(at, key=lambda found: min(found.us.values())), "shipped") if at else None

    def nearest(self, site: Site) -> Figures | None:
        """Of what is shipped of programs like that of ``site``, what is nearest in size."""

        def distance(row: tuple[str, Figures]) -> tuple[float, str]:
            sizes = map(int, row[0].split(" ")[1].split("x"))
            pairs = zip(sizes, (hint(site.m), site.n, site.k), strict=True)
            return sum(abs(math.log(one / other)) for one, other in pairs), row[0]

        return min(self._alike(site), key=distance, default=("", None))[1]

    def _alike(self, site: Site) -> list[tuple[str, Figures]]:
        """The shipped rows of programs like that of ``site``, with its layout and terms."""
        wanted = _how(key_of(site))
        rows = self._by_signature.get(signature(site.program), ())
        return [row for row in rows if _how(row[0]) == wanted]

    def own(self) -> Mapping[str, Figures]:
        """This user's measurements, by key."""
        self._refresh()
        return self._own

    def add(self, found: Mapping[str, Figures]) -> None:
        """Keep measurements; whoever calls holds the lock (``locks``).

        Raises:
            OSError: the file cannot be written; they are known in this process all the same.
        """
        self._refresh()
        self._own = {**self._own, **found}
        try:
            write(self.path, as_text(self.gpu, self._own))
        finally:
            self._stamp = _stamp(self.path)

    def leave(self, sites: Iterable[Site]) -> None:
        """Note ``sites`` to be measured another time; of very many the last ones."""
        kept = {key_of(site): site for site in (*self.left(), *sites)}
        with contextlib.suppress(OSError):
            texts = [site_text(site) for site in kept.values()]
            write(self.path.with_suffix(".left"), json.dumps(texts[-256:]))

    def left(self) -> list[Site]:
        """What :meth:`leave` noted and nobody has measured since; nothing if it cannot be read."""
        with contextlib.suppress(Exception):  # whatever it is: it will be noted again
            texts = json.loads(self.path.with_suffix(".left").read_text())
            return [site for site in map(site_from, texts) if self.find(site) is None]
        return []

    def _refresh(self) -> None:
        """Read the file again if another process has replaced it."""
        stamp = _stamp(self.path)
        if stamp is not None and stamp != self._stamp:
            self._own, self._stamp = {**self._own, **sites_in(self.path)}, stamp


def generation() -> str:
    """Changes when somebody has measured by hand (:func:`advance`): what torch's caches hold was
    decided without that. What is measured while a graph is compiled changes nothing here, or each
    process would find the graphs of the one before outdated."""
    try:
        return (cache_dir() / FOLDER / _GENERATION).read_text()
    except OSError:
        return ""


def advance() -> None:
    """Begin a new :func:`generation`.

    Raises:
        OSError: it cannot be written.
    """
    write(folder(FOLDER) / _GENERATION, secrets.token_hex(8))


@functools.lru_cache(maxsize=16)
def store_of(gpu: Gpu) -> Store:
    """The store of this process for ``gpu``."""
    return Store(gpu)


def versions() -> str:
    """Of everything that a time depends on, in a file's name: the kernel libraries, CUDA (whose
    cuBLAS is the other candidate), how programs are rendered."""
    return f"{label()}-cuda{torch.version.cuda or 'none'}-r{RENDERER_VERSION}"


def as_text(gpu: Gpu, sites: Mapping[str, Figures]) -> str:
    """The file's text: JSON with one site a line, in the order of their keys."""
    head = {"format": _FORMAT, "gpu": gpu.name, "processors": gpu.processors}
    head |= {"versions": versions()}
    lines = [f' "{name}": {json.dumps(value)},' for name, value in head.items()]
    rows = [json.dumps(to_row(key, sites[key])) for key in sorted(sites)]
    return "\n".join(
        ["{", *lines, ' "sites": [', ",\n".join(f"  {row}" for row in rows), " ]\n}\n"]
    )


def sites_in(path: Path) -> dict[str, Figures]:
    """The sites of a file of a store; none, with a warning, if it cannot be read."""
    try:
        data = json.loads(path.read_text())
        return _sites(data) if data["format"] == _FORMAT else {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        if path.exists():
            logger.warning("%s cannot be read (%r): its sites are measured again", path, error)
        return {}


def merged(texts: Iterable[str]) -> dict[str, Figures]:
    """The sites of several files; the last one counts."""
    return {key: found for text in texts for key, found in _sites(json.loads(text)).items()}


@functools.lru_cache(maxsize=16)
def _shipped_sites(table: Path) -> dict[str, Figures]:
    return _sites(json.loads(table.read_text()))


def _how(key: str) -> list[str]:
    """The words of ``key`` that say how operands lie; copied weights lie as one, and those of few
    experts as those of many."""
    counts = ("copied=", "groups=", "of=")
    return [word for word in key.split(" ")[2:] if not word.startswith(counts)]


def _sites(data: Mapping[str, Any]) -> dict[str, Figures]:
    found = {}
    for row in data.get("sites", ()):
        try:
            key, figures = from_row(row)
        except (KeyError, TypeError, ValueError, AttributeError):
            logger.debug("no measurement: %r", row)
            continue
        found[key] = figures
    return found


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size
