# SPDX-License-Identifier: Apache-2.0
"""Pattern files that a user might write, for the tests, and a model that has their gates."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from zoo.layers import Gated

D, HIDDEN = 16, 24

#: A gate with spellings.
MISH = '''
"""mish(gate) * up."""
import torch
import torch.nn.functional as F
from coda_inductor import Pattern

def mish_glu(gate, up):
    return F.mish(gate) * up

def spelled_out(gate, up):
    return gate * torch.tanh(F.softplus(gate)) * up

PATTERN = Pattern(name="mish_glu", meaning=mish_glu, idioms=(mish_glu, spelled_out))
'''

#: A gate with a number and a gradient that is given.
SWISH = '''
"""A gate with a temperature: gate * sigmoid(beta * gate) * up."""
import torch
from coda_inductor import Pattern

def swish_glu(gate, up, beta: float):
    return gate * torch.sigmoid(beta * gate) * up

def gradient(dy, gate, up, beta):
    s = torch.sigmoid(beta * gate)
    return dy * up * (s + beta * gate * s * (1 - s)), dy * gate * s

PATTERN = Pattern(name="swish_glu", meaning=swish_glu, gradient=gradient)
'''

#: An activation: one tensor.
SQUARED_SIGMOID = """
import torch
from coda_inductor import Pattern

def squared_sigmoid(x):
    return torch.sigmoid(x) ** 2

PATTERN = Pattern(name="squared_sigmoid", meaning=squared_sigmoid)
"""


def write(folder: Path, text: str, name: str = "gate.py") -> str:
    """A pattern file; its path."""
    path = folder / name
    path.write_text(text)
    return str(path)


def mish(g, u):
    return F.mish(g) * u


def mish_spelled_out(g, u):
    return u * (g * torch.tanh(F.softplus(g)))


def swish(g, u):
    return (g * torch.sigmoid(1.7 * g)) * u


def model(gate, layers: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Blocks in sequence; their gates are ``gate(g, u)``."""
    return nn.Sequential(*(Gated(D, HIDDEN, gate=gate) for _ in range(layers))).to(dtype)
