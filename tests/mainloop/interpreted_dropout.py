# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of ``mainloop/dropout.py`` in Triton's interpreter, against plain torch. A
script: ``TRITON_INTERPRET`` counts when a kernel is defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from coda_inductor.mainloop import dropout as kernels
from coda_inductor.semantic import dropout as plain

HALF, SINGLE = torch.float16, torch.float32
#: Leading sizes, K, rank, masks, p, dtypes of x and of the weights.
CASES = (
    ((2, 35), 200, 8, 3, 0.1, SINGLE, SINGLE),
    ((140,), 600, 16, 1, 0.05, SINGLE, SINGLE),
    ((70,), 301, 24, 2, 0.5, HALF, HALF),
    ((1, 1), 64, 1, 4, 0.7, SINGLE, HALF),
    ((0, 4), 64, 8, 2, 0.7, HALF, HALF),
)


def main() -> None:
    count = 0
    for lead, k, rank, masks, p, of_x, of_weights in CASES:
        x = torch.randn(*lead, 2 * k, dtype=of_x)[..., :k]
        weight = torch.randn(masks * rank, k, dtype=of_weights) / k**0.5
        others = weight, torch.tensor([-3]), 5, masks, p
        t = plain.dropout_linear(x, *others)
        dt = torch.randn_like(t)
        pairs = [(t, kernels.dropout_linear(x, *others))]
        for needs in ([True, True], [True, False], [False, True]):
            want = plain.dropout_linear_backward(dt, x, *others, needs)
            pairs += zip(want, kernels.dropout_linear_backward(dt, x, *others, needs), strict=True)
        for want, got in pairs:
            bound = 2e-3 if want.dtype == HALF else 2e-6
            most = want.abs().max().item() if want.numel() else 0.0
            torch.testing.assert_close(got, want, rtol=bound, atol=bound * most)
            count += 1
    print(f"{count} tensors agree")  # noqa: T201 (what the test reads)


if __name__ == "__main__":
    main()
