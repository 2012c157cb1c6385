# SPDX-License-Identifier: Apache-2.0
"""Cases, by name, and ways of compiling them."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import models
from .measure import register

FORWARD, TRAINING = "forward", "training"


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison: a model, its tokens, and "forward" or "training"."""

    size: str
    rows: int
    mode: str

    @property
    def name(self) -> str:
        """For example ``8B-4096-training-bf16``."""
        return f"{self.size}-{self.rows}-{self.mode}-bf16"

    @property
    def training(self) -> bool:
        """Are there gradients?"""
        return self.mode == TRAINING

    @classmethod
    def parse(cls, name: str) -> Case:
        """The case of a :attr:`name`; ValueError if it is none."""
        size, rows, mode, dtype = name.split("-")
        if mode not in (FORWARD, TRAINING) or dtype != "bf16" or size not in models.MODELS:
            raise ValueError(name)
        return cls(size, int(rows), mode)


def chosen(patterns: Sequence[str], every: Iterable[Case]) -> list[Case]:
    """Those of `every` whose names match one of the shell `patterns`; a full name of another case
    is that case. Raises ValueError for a pattern that is neither.
    """
    every = list(every)
    found: dict[Case, None] = {}
    for pattern in patterns:
        matches = [case for case in every if fnmatch.fnmatchcase(case.name, pattern)]
        try:
            matches = matches or [Case.parse(pattern)]
        except ValueError:
            raise ValueError(f"{pattern!r} matches no case such as {every[0].name}") from None
        found |= dict.fromkeys(matches)
    return list(found)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a variant calls torch.compile: `backend` ("" for eager), and `mode` or `options`.

    `attention`: "causal" tells the model's SDPA to be causal instead of giving it a mask that says
    so, "flex" takes FlexAttention, which skips blocks that a mask hides.
    `liger`: the model is patched with Liger's kernels before.
    """

    backend: str = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None
    attention: str = ""
    liger: bool = False

    def compile(self, module: Any, **more: Any) -> Any:
        """`module`, compiled that way when first called."""
        if not self.backend:
            return module
        register(self.backend)
        return torch.compile(
            module, backend=self.backend, mode=self.mode, options=self.options, **more
        )


def ways(given: dict[str, Any] | None = None) -> dict[str, Way]:
    """The variants by name; "coda_options" is ours with the options `given`, if there are any."""
    found = {
        "eager": Way(""),
        "liger": Way("", liger=True),
        "liger_compile": Way(liger=True),
        "compile": Way(),
        "coda": Way("coda"),
        "compile_causal": Way(attention="causal"),
        "compile_flex": Way(attention="flex"),
        "max_autotune": Way(mode="max-autotune-no-cudagraphs"),
    }
    if given:
        found["coda_options"] = Way("coda", options=given)
    return found


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value
