# SPDX-License-Identifier: Apache-2.0
"""Train in FP8: a model that torchao has converted, beside bfloat16.

Usage: python examples/fp8.py        (needs torchao)
"""

from __future__ import annotations

import torch
from beside import BACKENDS, llama, show, tokens
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


def rowwise(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with torchao's rowwise FP8 linears, but for the LM head."""
    return convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name("rowwise"),
        module_filter_fn=lambda _, name: name != "lm_head",
    )


def main() -> None:
    """Forward and backward of each way."""
    batch = tokens()
    for name, converted in (("bfloat16", lambda model: model), ("fp8 rowwise", rowwise)):
        for backend in BACKENDS:
            model = converted(llama())
            compiled = torch.compile(model, backend=backend)

            def step(model=model, compiled=compiled) -> None:
                compiled(batch, labels=batch).loss.backward()
                model.zero_grad(set_to_none=True)

            show(f"{backend}, {name}", step)


if __name__ == "__main__":
    main()
