# SPDX-License-Identifier: Apache-2.0
"""The plugin and the example's YAML. A stub stands for axolotl: the plugin knows one class."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from coda_inductor.options import parse

for needed in ("accelerate", "pydantic", "transformers", "yaml"):
    pytest.importorskip(needed)
YAML = Path(__file__).parents[1] / "examples" / "axolotl.yaml"
NAMES = ("axolotl", "axolotl.integrations", "axolotl.integrations.base", "coda_inductor.axolotl")


def test_the_yamls_plugin_gives_trainers_the_callback(monkeypatch):
    import yaml

    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[NAMES[2]].BasePlugin = base = type("BasePlugin", (), {})
    del sys.modules[NAMES[3]]
    given = yaml.safe_load(YAML.read_text())
    (loaded,) = (named(path)() for path in given["plugins"])
    assert isinstance(loaded, base)
    schema = named(loaded.get_input_args())
    for text, options in ((given, given["coda_options"]), ({}, {})):
        cfg = SimpleNamespace(**schema(**text).model_dump())
        (callback,) = loaded.add_callbacks_pre_trainer(cfg, None)
        assert callback.how == {"options": options}
        parse(None, options)  # raises an error where one is unknown


def named(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
