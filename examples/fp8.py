# SPDX-License-Identifier: Apache-2.0
"""Train in FP8: coda's option, beside torchao's conversion and bfloat16.

``options={"fp8": "rowwise"}`` quantizes the operands of the linear layers of Llama's blocks.
A model that torchao has converted is compiled by coda as well.

Usage: python examples/fp8.py        (needs torchao for the rows that name it)
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from beside import BACKENDS, REAL, llama, show, tokens


def torchao(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with torchao's rowwise FP8 linears, but for the LM head."""
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    return float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name
    )


def main() -> None:
    """Forward and backward of each way."""
    batch = tokens()
    ways: list[tuple[str, bool, dict[str, Any]]] = [(b, False, {"backend": b}) for b in BACKENDS]
    fp8 = {"fp8": "rowwise", "fp8_skip": ["lm_head"], "fp8_small": not REAL}
    ways += [("coda, fp8 rowwise", False, {"backend": "coda", "options": fp8})]
    if importlib.util.find_spec("torchao"):
        ways += [(f"{b}, torchao rowwise", True, {"backend": b}) for b in BACKENDS]
    for name, converted, how in ways:
        model = torchao(llama()) if converted else llama()
        compiled = torch.compile(model, **how)

        def step(model=model, compiled=compiled) -> None:
            compiled(batch, labels=batch).loss.backward()
            model.zero_grad(set_to_none=True)

        show(name, step)


if __name__ == "__main__":
    main()
