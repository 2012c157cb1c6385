# SPDX-License-Identifier: Apache-2.0
"""The entropy of a model's next tokens, raised to ``coda_inductor::entropy``.

Before::

    chances = F.softmax(logits.float(), -1)
    entropy = torch.logsumexp(logits.float(), -1) - (chances * logits.float()).sum(-1)

After::

    entropy, lse, wide = coda_inductor.entropy(logits, dtype)

Why it is valid: both are the sum of ``-p log p`` over a row; the op computes it in float32 (float64
for float64). Where p is 0 it adds 0, while ``0 * -inf`` would be NaN.

What it enables: neither chances nor their logarithms are in memory. The entropies of tiles leave
the LM head's epilogue beside their log-sum-exps (rule R7), and the gradient is made with that of
the tokens' log-probabilities, a slice of the vocabulary at a time.

Refuses: chances or logarithms that something else reads; logits that are integers.
"""

import torch
import torch.nn.functional as F

from coda_inductor import Match, Pattern, value
from coda_inductor.refusal import refuse
from coda_inductor.semantic.loss import entropy


def from_logits(logits):
    chances = F.softmax(logits, -1)
    return torch.logsumexp(logits, -1) - (chances * logits).sum(-1)


def from_logarithms(logits):
    logs = F.log_softmax(logits, -1)
    return -(torch.exp(logs) * logs).sum(-1)


def from_both(logits):
    return -(F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1)


def negative_terms(logits):
    logs = F.log_softmax(logits, -1)
    return (-torch.exp(logs) * logs).sum(-1)


def negative_terms_of_both(logits):
    return (-F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1)


def _rows_of_floats(match: Match):
    logits, result = value(match.bound["logits"]), value(match.root)
    tensors = isinstance(logits, torch.Tensor) and isinstance(result, torch.Tensor)
    if not tensors or not logits.is_floating_point() or result.shape != logits.shape[:-1]:
        return refuse("idiom-form", "the logits are no rows of a floating type")
    return None


PATTERN = Pattern(
    name="entropy",
    idioms=(from_logits, from_logarithms, from_both, negative_terms, negative_terms_of_both),
    op=entropy,
    arguments=lambda match: (match.bound["logits"], value(match.root).dtype),
    conditions=(_rows_of_floats,),
    result=0,
    example={"logits": (6, 3)},  # of one or two rows all may be certain
)
