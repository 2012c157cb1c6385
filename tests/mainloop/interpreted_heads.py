# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of ``mainloop/head_gradients.py`` in Triton's interpreter, against plain torch.

A script: ``TRITON_INTERPRET`` counts when a kernel is defined.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from head_cases import NAMES, cases, error
from triton_kernels import patch_once

from coda_inductor.runtime.head_gradients import _launched, head_gradient


def main() -> None:
    patch_once()
    count = 0
    for args in cases(torch.float32):
        *given, eps, distance, paired, inverse, dweight = args
        have = _launched(*given, eps, distance == 1, paired, inverse, dweight)
        want = head_gradient(*args)
        for name, mine, theirs in zip(NAMES, have, want, strict=True):
            assert mine.shape == theirs.shape, name
            assert error(mine, theirs) < 1e-5, (name, args[0].shape, args[6:])
        count += 1
    print(f"{count} gradients agree")  # noqa: T201 (what the test reads)


if __name__ == "__main__":
    main()
