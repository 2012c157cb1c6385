# SPDX-License-Identifier: Apache-2.0
"""What torchtitan 0.2 has of a trainer's specification, where it is not installed: its names, and
nothing else of it."""

import contextlib
import dataclasses
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.layers import Decoder

IGNORED = -100


@dataclasses.dataclass
class Compile:
    enable: bool = True
    backend: str = "coda"
    components: tuple[str, ...] = ("model", "loss")


@dataclasses.dataclass
class Config:
    compile: Compile


@dataclasses.dataclass
class Dims:
    tp_enabled: bool = False
    pp_enabled: bool = False


def cross_entropy_loss(pred, labels):
    rows = pred.flatten(0, 1).float()
    return F.cross_entropy(rows, labels.flatten(0, 1), reduction="sum", ignore_index=IGNORED)


def build_cross_entropy_loss(job_config, **_how):
    given = job_config.compile
    compiled = given.enable and "loss" in given.components
    loss = cross_entropy_loss
    return torch.compile(loss, backend=given.backend) if compiled else loss


class Model(Decoder):
    """With its head under the name that torchtitan's models have."""

    def __init__(self, **how: Any):
        super().__init__(**how)
        self.output = self.head
        del self.head

    def forward(self, tokens):
        return self.output(self.trunk(tokens))


@dataclasses.dataclass
class TrainSpec:
    parallelize_fn: Callable[..., nn.Module] = lambda model, *_: model
    build_loss_fn: Callable[..., Any] = build_cross_entropy_loss


@contextlib.contextmanager
def imported() -> Iterator[tuple[Any, dict[str, Any]]]:
    """(our module as a trainer has imported it, the specs that it has registered)."""
    specs: dict[str, Any] = {}

    def known(name):
        if name == "gpt_oss":  # not in all versions
            raise ValueError(f"TrainSpec {name} is not registered.")
        return TrainSpec()

    names = {"get_train_spec": known, "register_train_spec": specs.__setitem__}
    loss = {"build_cross_entropy_loss": build_cross_entropy_loss}
    folders = {"torchtitan": {}, "torchtitan.components": {}, "torchtitan.protocols": {}}
    files = {"torchtitan.components.loss": loss, "torchtitan.protocols.train_spec": names}
    ours = "coda_inductor.torchtitan"
    before = {name: sys.modules.pop(name, None) for name in (*folders, *files, ours)}
    for name, content in (folders | files).items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        yield importlib.import_module(ours), specs
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
