# SPDX-License-Identifier: Apache-2.0
"""Triton kernels without a GPU: a script run by Triton's interpreter, PTX for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent


def interpreted(script: str) -> str:
    """What a script of this folder prints, in a process of its own.

    ``TRITON_INTERPRET``, which it sets, counts when a kernel is defined.
    """
    paths = [str(HERE.parents[1]), str(HERE.parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(HERE / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled(kernel, types: Mapping[str, str], constants: Mapping[str, object], **options) -> str:
    """PTX of a kernel for sm_90 whose pointers and integers are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    whole = [name for name in names if name in types and types[name] != "fp32"]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    return made.asm["ptx"]
