# SPDX-License-Identifier: Apache-2.0
"""Triton kernels without a GPU: a script run by Triton's interpreter, PTX for Hopper."""

from __future__ import annotations

import functools
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


def patch_once() -> None:
    """For such a script: the interpreter puts its functions in the place of Triton's once for each
    function of ours, and leaves them there, instead of at each call (a third of the time)."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    class Kept:
        def restore(self) -> None:
            pass

    @functools.cache
    def patch_and_keep(function: object) -> Kept:
        patch(function)
        return Kept()

    interpreter._patch_lang = patch_and_keep


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
