# SPDX-License-Identifier: Apache-2.0
"""A plugin of axolotl's: ``plugins: [coda_inductor.axolotl.Plugin]`` in its YAML gives its trainers
:class:`coda_inductor.transformers.CodaCallback`, with the options under ``coda_options``."""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from coda_inductor.transformers import CodaCallback


class Arguments(BaseModel):
    """What the YAML may say: ``coda_options``, the options of ``backend="coda"``."""

    coda_options: dict[str, Any] | None = None


class Plugin(BasePlugin):
    """Compile the model for ``backend="coda"`` when training begins, with its adapters."""

    def get_input_args(self) -> str:
        """The schema of the plugin's part of the YAML."""
        return "coda_inductor.axolotl.Arguments"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:  # noqa: ARG002
        """The callback that compiles; Trainer passes it ``model``."""
        return [CodaCallback(options=dict(cfg.coda_options or {}))]
