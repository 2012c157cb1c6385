# SPDX-License-Identifier: Apache-2.0
"""A random program: inputs and a function as source text, and how it is to be run.

All that is run is text, so that a failure can print a script that runs the same. In the text
``low`` and ``high`` stand for the dtype of weights and the one of careful places (norms, losses):
float64 both where values are compared, bfloat16 and float32 where rounding is.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from typing import Any

HEADER = """\
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

low, high = torch.{low}, torch.{high}


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64).to(low)
"""

#: Thresholds below which a rewrite does not pay; small programs would never reach them.
THRESHOLDS = """\
from coda_inductor.dynamo import late_gradients
from coda_inductor.rewrite import tables
from coda_inductor.runtime import linear_cross_entropy

late_gradients.LEAST_BYTES = linear_cross_entropy.SLICE_BYTES = 0
tables.LEAST_READS = 2
"""

#: What a script does with the program; ``{backend}`` is text.
SCRIPT = '''\
"""{title}

Run it from the root of the repository.
"""

import sys

import pytest

sys.path[:0] = [".", "tests"]

{program}

{thresholds}
from harness import Harness


def run(backend):
    torch._dynamo.reset()
    tensors = make()
    call, arguments = build(tensors)
    if backend is not None:
        call = torch.compile(call, **backend, dynamic={dynamic})
    with torch.set_grad_enabled({training}):
        values = [*call(*arguments)]
    values += differentiate(values, tensors) if {training} else []
    return values + [*tensors.values()]


def show(t):
    return t if t is None else (t.dtype, tuple(t.shape), t.stride(), t.detach())

{custom}
wrong = False
for ours, eager in zip(run({backend}), run(None), strict=True):
    alike = (ours is None) == (eager is None) and (
        ours is None
        or (ours.dtype, ours.shape, ours.stride()) == (eager.dtype, eager.shape, eager.stride())
        and torch.allclose(ours, eager, {tolerance}, {tolerance}, equal_nan=True)
    )
    wrong |= not alike
    if not alike:
        print("ours ", show(ours), "eager", show(eager), sep="\\n")
sys.exit(wrong)
'''
#: Every fused site stays a custom op, as with a kernel on CUDA.
CUSTOM = """
from checking import leave_custom_ops

leave_custom_ops(pytest.MonkeyPatch(), "64x32:1x1:co")
"""

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
    """Text and settings.

    Attributes:
        inputs: name and expression of each input, in order; later ones may read earlier ones.
        body: the statements of ``function``, which takes the inputs; it returns a list of tensors.
        trained: the inputs that want a gradient; none: it runs under no_grad.
        weights: the inputs that are parameters of a module rather than arguments, so that their
            sizes are static where those of arguments are dynamic.
        dynamic: what torch.compile gets.
        custom: whether fused sites stay custom ops.
        seed: of the inputs' values.
        low, high: names of dtypes.
    """

    inputs: tuple[tuple[str, str], ...]
    body: str
    trained: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    dynamic: bool = False
    custom: bool = False
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
        """The namespace of :meth:`source`, executed."""
        namespace: dict[str, Any] = {}
        exec(compile(self.source(low, high), "<program>", "exec"), namespace)  # noqa: S102
        return namespace

    def script(
        self, title: str, backend: str = "dict(backend=Harness())", tolerance: float = 1e-7
    ) -> str:
        """A file that runs the program and shows what differs from eager."""
        return SCRIPT.format(
            title=title.replace("\\", "/"),
            program=self.source().strip(),
            thresholds=THRESHOLDS.strip(),
            dynamic=self.dynamic,
            training=self.training,
            custom=CUSTOM if self.custom else "",
            backend=backend,
            tolerance=tolerance,
        )

    def size(self) -> int:
        """Statements, nested ones too."""
        return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(_module(self.body))))


def _module(body: str) -> str:
    return f"def function():\n{textwrap.indent(body, '    ')}"
