# SPDX-License-Identifier: Apache-2.0
"""The files of measurements: one readable file for each GPU model, one line per site.

This user's measurements are in ``<cache>/measured/<GPU>-<versions>.json``, the shipped ones in the
tables under ``select/tables``. Files are replaced as a whole, under a lock (``locks``), and never
trusted: a line that is not a measurement is skipped. Beside them, ``<GPU>-<versions>.left`` lists
the sites that were compiled without a measurement, for ``python -m coda_inductor tune``.
"""

import contextlib
import functools
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coda_inductor.cache_dir import cache_dir, folder, prewarmed, write
from coda_inductor.codegen.render import RENDERER_VERSION
from coda_inductor.gpu import Gpu
from coda_inductor.graph.sizes import hint
from coda_inductor.log import logger
from coda_inductor.mainloop.environment import label
from coda_inductor.select.figures import Figures, from_row, key_of, signature, to_row
from coda_inductor.select.site import Site, site_from, site_text

FOLDER = "measured"
_FORMAT = 1
_GENERATION = "generation"


class Measurements:
    """All measurements for ``gpu``: this user's, in the file ``path``, and the shipped ones."""

    def __init__(self, gpu: Gpu, base: Path | None = None):
        name = f"{gpu.file}-{versions()}.json"
        self.path = (folder(FOLDER) if base is None else base) / name
        self.gpu = gpu
        self._stamp: tuple[int, int] | None = None
        self._user_rows: dict[str, Figures] = {}
        self._shipped = {} if gpu.sites is None else _sites(json.loads(gpu.sites.read_text()))
        if base is None and (read_only := prewarmed()) is not None:
            self._shipped |= sites_in(read_only / FOLDER / name)
        self._by_signature: dict[str, list[tuple[str, Figures]]] = {}
        for row in self._shipped.items():
            if row[1].like and row[1].us:
                self._by_signature.setdefault(row[1].like, []).append(row)

    @property
    def empty(self) -> bool:
        """Are there no measurements at all?"""
        return not (self._shipped or self.user_rows())

    def find(self, site: Site) -> tuple[Figures, str] | None:
        """The measurements of ``site``, and their origin: "here" (this user's) or "shipped". They
        may come from a similar program (``figures.signature``); the slowest counts; or None."""
        self._refresh()
        key = key_of(site)
        if (figures := self._user_rows.get(key)) is not None:
            return figures, "here"
        if (row := self._shipped.get(key)) is not None:
            return row, "shipped"
        size = key.partition(" ")[2]
        rows = [row for name, row in self._similar(site) if name.partition(" ")[2] == size]
        slowest = max(rows, key=lambda figures: min(figures.us.values()), default=None)
        return None if slowest is None else (slowest, "shipped")

    def nearest(self, site: Site) -> tuple[Site, Figures] | None:
        """The nearest shipped measurements of a program like the site's, ``site`` at that size."""

        def distance(row: tuple[str, Figures]) -> tuple[float, str]:
            pairs = zip(_size(row[0]), (hint(site.m), site.n, site.k), strict=True)
            return sum(abs(math.log(a / b)) for a, b in pairs), row[0]

        key, figures = min(self._similar(site), key=distance, default=("", None))
        if figures is None:
            return None
        m, n, k = _size(key)
        return replace(site, m=m, n=n, k=k), figures

    def _similar(self, site: Site) -> list[tuple[str, Figures]]:
        layout = _layout(key_of(site))
        rows = self._by_signature.get(signature(site.program), ())
        return [row for row in rows if _layout(row[0]) == layout]

    def user_rows(self) -> Mapping[str, Figures]:
        """This user's measurements, by key."""
        self._refresh()
        return self._user_rows

    def add(self, figures: Mapping[str, Figures]) -> None:
        """Keep measurements. The caller holds the lock (``locks``). Raises OSError if the file
        cannot be written; this process has the measurements anyway."""
        self._refresh()
        self._user_rows = {**self._user_rows, **figures}
        try:
            write(self.path, as_text(self.gpu, self._user_rows))
        finally:
            self._stamp = _stamp(self.path)

    def leave(self, sites: Iterable[Site]) -> None:
        """Note ``sites`` to be measured later; if there are very many, only the last ones."""
        by_key = {key_of(site): site for site in (*self.left(), *sites)}
        with contextlib.suppress(OSError):
            texts = [site_text(site) for site in by_key.values()]
            write(self.path.with_suffix(".left"), json.dumps(texts[-256:]))

    def left(self) -> list[Site]:
        """The sites of :meth:`leave` without a measurement since; empty if unreadable."""
        with contextlib.suppress(Exception):  # any error: the sites will be noted again
            texts = json.loads(self.path.with_suffix(".left").read_text())
            sites = [replace(site_from(text), arch=self.gpu.arch) for text in texts]
            return [site for site in sites if self.find(site) is None]
        return []

    def _refresh(self) -> None:
        """Read the file again if another process has replaced it."""
        stamp = _stamp(self.path)
        if stamp is not None and stamp != self._stamp:
            self._user_rows, self._stamp = {**self._user_rows, **sites_in(self.path)}, stamp


def generation() -> str:
    """A text that changes when a user has measured explicitly (:func:`advance`), because the graphs
    in torch's caches were decided without these measurements. Measurements during compilation do
    not change it, or the graphs of each process would be outdated for the next one."""
    try:
        return (cache_dir() / FOLDER / _GENERATION).read_text()
    except OSError:
        return ""


def advance() -> None:
    """Begin a new :func:`generation`. Raises OSError if it cannot be written."""
    write(folder(FOLDER) / _GENERATION, secrets.token_hex(8))


@functools.lru_cache(maxsize=16)
def measurements_of(gpu: Gpu) -> Measurements:
    """The measurements for ``gpu`` in this process."""
    return Measurements(gpu)


def versions() -> str:
    """The versions of everything that times depend on, for a file's name: the kernel libraries,
    CUDA (its cuBLAS is the alternative), and the renderer of programs."""
    return f"{label()}-cuda{torch.version.cuda or 'none'}-r{RENDERER_VERSION}"


def as_text(gpu: Gpu, sites: Mapping[str, Figures]) -> str:
    """The text of a file: JSON with one site per line, in the order of their keys."""
    head = {"format": _FORMAT, "gpu": gpu.name, "processors": gpu.processors}
    head |= {"versions": versions()}
    lines = [f' "{name}": {json.dumps(value)},' for name, value in head.items()]
    rows = [json.dumps(to_row(key, sites[key])) for key in sorted(sites)]
    return "\n".join(
        ["{", *lines, ' "sites": [', ",\n".join(f"  {row}" for row in rows), " ]\n}\n"]
    )


def sites_in(path: Path) -> dict[str, Figures]:
    """The sites of a store's file; none, with a warning, if it cannot be read."""
    try:
        data = json.loads(path.read_text())
        return _sites(data) if data["format"] == _FORMAT else {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        if path.exists():
            logger.warning("%s cannot be read (%r): its sites are measured again", path, error)
        return {}


def _size(key: str) -> list[int]:
    """M, N and K in ``key``; M is that of its class of rows."""
    return [int(size) for size in key.split(" ")[1].split("x")]


def _layout(key: str) -> list[str]:
    """The words of ``key`` about layouts. Concatenated weights are as one, few experts as many."""
    counts = ("copied=", "groups=", "of=")
    return [word for word in key.split(" ")[2:] if not word.startswith(counts)]


def _sites(data: Mapping[str, Any]) -> dict[str, Figures]:
    sites = {}
    for row in data.get("sites", ()):
        try:
            key, figures = from_row(row)
        except (KeyError, TypeError, ValueError, AttributeError):
            logger.debug("no measurement: %r", row)
            continue
        sites[key] = figures
    return sites


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size
