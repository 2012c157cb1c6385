# SPDX-License-Identifier: Apache-2.0
"""What a fused GEMM is told of the next one, which was fused before it."""

import torch
from harness import Harness


def test_that_the_next_gemm_adds_this_result_is_said():
    def chain(x, z, a, b):
        y = x @ a
        return torch.relu(torch.relu(z @ b) + y)

    harness = Harness(reference=True)
    args = torch.randn(8, 16), torch.randn(8, 16), torch.randn(16, 16), torch.randn(16, 16)
    torch.testing.assert_close(harness.run(chain, *args), chain(*args))
    reasons = [why for site in harness.report.sites for why in (*site.stops, site.refusal) if why]
    texts = [why.text for why in reasons]
    assert any("next fused GEMM" in text for text in texts), texts
    assert not any("gemm_epilogue" in text and "elementwise" in text for text in texts)
