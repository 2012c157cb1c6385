# SPDX-License-Identifier: Apache-2.0
"""The fused sites of Llama layers of any width, for the measurements that ship.

One layer is traced, forward and training, with sizes that are all different; what a site's N and K
are made of is read off them, and every other width has the same sites. A plan shows only the sites
that it prefers, so that it is made three times: everything that is fused wins, then several GEMMs
in one kernel lose, then everything does. What a plan with the measurements asks for beyond these,
where some win and others lose, says :func:`asked`.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from coda_inductor import pipeline, plan
from coda_inductor.explanation.capture import capture
from coda_inductor.options import parse
from coda_inductor.select.config import legal_configs
from coda_inductor.select.device import gpu_of
from coda_inductor.select.figures import Figures, key_of
from coda_inductor.select.site import Site
from coda_inductor.select.store import Store, store_of

from . import layer

#: Model width, MLP width, width of k and v: no sum of them is another one, nor the rows.
_TRACED = (4096, 14336, 1024)
_ROWS = 8192


def layers(
    widths: Sequence[tuple[int, int, int]], rows: Sequence[int], dtype: torch.dtype, recipe=""
) -> list[Site]:
    """The sites of layers of (model width, MLP width, width of k and v) at so many rows, each
    once; in FP8 by `recipe`, if there is one."""
    found, traced = {}, _traced(dtype, recipe)
    for m in rows:
        for width in widths:
            for site in traced:
                other = _resized(site, m, width)
                found.setdefault(key_of(other), other)
    return list(found.values())


def _resized(site: Site, m: int, width: tuple[int, int, int]) -> Site:
    d, f, kv = width
    old_d, old_f, old_kv = _TRACED
    sizes = {old_d: d, old_f: f, old_kv: kv, 2 * old_f: 2 * f, old_d + 2 * old_kv: d + 2 * kv}
    sizes[_ROWS] = m  # K of a weight's gradient
    copied = tuple(sizes[k] for k in site.copied)
    return replace(site, m=sizes[site.m], n=sizes[site.n], k=sizes[site.k], copied=copied)


class _Listener:
    """Measures nothing; ``found``: what it was asked for."""

    left: dict[str, Site] = {}  # noqa: RUF012 (never changed)

    def __init__(self, *_):
        self.found: dict[str, Site] = {}

    def measure(self, sites: Sequence[Site]) -> bool:
        self.found |= {key_of(site): site for site in sites}
        return False

    def close(self) -> None:
        pass


def asked(width: tuple[int, int, int], m: int, dtype: torch.dtype) -> list[Site]:
    """The sites of a layer, forward and training, that its plans would have measured now."""
    listener, store = _Listener(), store_of(gpu_of(_device()))
    for train in (False, True):
        torch._dynamo.reset()
        _plan(width, m, dtype, lambda *_: listener, store, train=train)
    return list(listener.found.values())


def _plan(
    width: tuple[int, int, int],
    m: int,
    dtype: torch.dtype,
    tuner: Callable[..., object],
    store: Store,
    *,
    train: bool,
    recipe: str = "",
) -> None:
    """Plan one layer with what ``store`` knows; ``tuner`` makes what is asked to measure."""
    options = {"tune": "always"} | ({"fp8": recipe, "fp8_small": True} if recipe else {})
    with torch.device("meta"):
        block = layer.Block(*width).to(dtype)
        x0, y = (torch.empty(1, m, width[0], dtype=dtype) for _ in range(2))
    inputs = [x.requires_grad_(train) for x in (x0, y)]
    with (
        mock.patch.object(plan, "store_of", return_value=store),
        mock.patch.object(pipeline, "Tuner", tuner),
        torch.set_grad_enabled(train),
    ):
        capture(block, tuple(inputs), {}, parse(None, options), as_if=_device())


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class _Answers:
    """Stands for a measurement: fused sites win, or lose, as ``loses`` says."""

    left: dict[str, Site] = {}  # noqa: RUF012 (never changed)

    def __init__(self, store: Store, found: dict[str, Site], loses):
        self.store, self.found, self.loses = store, found, loses
        self.known: dict[str, Figures] = {}

    def measure(self, sites: Sequence[Site]) -> bool:
        new = [site for site in sites if key_of(site) not in self.known]
        for site in new:
            self.found.setdefault(key_of(site), site)
            config = str(legal_configs(site.program)[0])
            us = 2.0 if self.loses(site) else 1.0
            self.known[key_of(site)] = Figures({config: us}, 1.5, 1.0, m=site.m)
        self.store.add(self.known)
        return bool(new)

    def close(self) -> None:
        pass


@functools.cache
def _traced(dtype: torch.dtype, recipe: str) -> list[Site]:
    """The sites of the traced layer, also those whose measurements ship."""
    found: dict[str, Site] = {}
    answers = (lambda _: False, _several, lambda _: True)
    for train in (False, True):
        for loses in answers:
            with tempfile.TemporaryDirectory() as folder:
                store = Store(replace(gpu_of(_device()), sites=None), Path(folder))
                made = _Answers(store, found, loses)
                tuner = lambda *_, made=made: made  # noqa: E731
                _plan(_TRACED, _ROWS, dtype, tuner, store, train=train, recipe=recipe)
    return list(found.values())


def _several(site: Site) -> bool:
    return site.program.paired or site.terms > 1 or bool(site.copied)
