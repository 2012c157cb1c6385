# SPDX-License-Identifier: Apache-2.0
"""A random program: inputs and a function as source text, and how it is to be run.

All that is run is text, so that a failure can print a script that runs the same. In the text
``low`` and ``high`` stand for the dtype of weights and the one of careful places (norms, losses):
float64 both where values are compared, bfloat16 and float32 where rounding is.
"""

import textwrap
from dataclasses import dataclass, fields
from typing import Any

HEADER = """\
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from zoo import seen

low, high = torch.{low}, torch.{high}


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64).to(low)
"""

#: A failure, to be run again.
SCRIPT = '''\
"""{title}

Run it from the root of the repository.
"""

import sys

sys.path[:0] = [".", "tests", "tests/fuzz"]
import fuzz_seeds
from fuzz_program import Program

program = Program(
{settings}
)
found = fuzz_seeds.judged("{mode}", program)
print(program.source(), found.failure or found.invalid or "as eager has it", sep="\\n")
sys.exit(bool(found.failure))
'''
DIFFERENTIATE = '''
def differentiate(outputs, tensors):
    """Gradients of the inputs, random numbers being those of the outputs."""
    wanted = [t for t in outputs if t.requires_grad]
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in wanted]
    if wanted:
        torch.autograd.backward(wanted, [g.bfloat16().to(t) for g, t in zip(given, wanted)])
    return [t.grad for t in tensors.values()]
'''


@dataclass(frozen=True)
class Program:
    """``inputs`` are names and expressions, of which later ones may read earlier ones; ``body`` the
    statements of a function of them that returns a list of tensors. Those ``trained`` want a
    gradient (without any it runs under no_grad); ``weights`` are parameters of a module, not
    arguments, so that their sizes are static. ``custom``: fused sites stay custom ops; ``seed`` is
    that of the inputs' values."""

    inputs: tuple[tuple[str, str], ...]
    body: str
    trained: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    dynamic: bool = False
    custom: bool = False
    memory: float | None = None
    seed: int = 0
    low: str = "float64"
    high: str = "float64"

    @property
    def training(self) -> bool:
        return bool(self.trained)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.inputs]

    def source(self, low: str | None = None, high: str | None = None) -> str:
        """Python that defines ``make``, ``function``, ``build`` and ``differentiate``."""
        header = HEADER.format(low=low or self.low, high=high or self.high)
        lines = [f"    {name} = {text}" for name, text in self.inputs]
        make = ["def make():", f"    torch.manual_seed({self.seed})", *lines]
        if self.trained:
            each = f"({', '.join(self.trained)},)"
            make += [f"    for t in {each}:", "        t.requires_grad_()"]
        make += [f"    return dict({', '.join(f'{name}={name}' for name in self.names)})"]
        function = f"def function({', '.join(self.names)}):\n{textwrap.indent(self.body, '    ')}"
        parts = [header, "\n".join(make), function, self._build(), DIFFERENTIATE.strip()]
        return "\n\n".join(part.strip() + "\n" for part in parts)

    def _build(self) -> str:
        """Text of ``build(tensors)``: what is called, and with which arguments."""
        arguments = [name for name in self.names if name not in self.weights]
        listed = "".join(f'tensors["{name}"], ' for name in arguments)
        if not self.weights:
            return f"def build(tensors):\n    return function, ({listed})"
        passed = [f"self.{name}" if name in self.weights else name for name in self.names]
        return textwrap.dedent(f"""\
            class Model(torch.nn.Module):
                def __init__(self, tensors):
                    super().__init__()
                    for name in {self.weights}:
                        t = tensors[name]
                        tensors[name] = torch.nn.Parameter(t, t.requires_grad)
                        setattr(self, name, tensors[name])

                def forward({", ".join(["self", *arguments])}):
                    return function({", ".join(passed)})


            def build(tensors):
                return Model(tensors), ({listed})""")

    def load(self, low: str | None = None, high: str | None = None) -> dict[str, Any]:
        namespace: dict[str, Any] = {}
        exec(compile(self.source(low, high), "<program>", "exec"), namespace)  # noqa: S102
        return namespace

    def script(self, title: str, mode: str) -> str:
        """A file that judges the program again, as ``mode`` does, and shows its source."""
        body = self.body.replace("\\", "\\\\").replace('"""', "'''")
        settings = [f"    {f.name}={getattr(self, f.name)!r}," for f in fields(self)]
        settings[1] = f'    body="""\\\n{body}""",'
        return SCRIPT.format(
            title=title.replace("\\", "/"), mode=mode, settings="\n".join(settings)
        )
