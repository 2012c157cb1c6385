# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of a language model's logits, raised to ``coda_inductor::cross_entropy``.

Before::

    loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1), ignore_index=-100)

    loss = F.nll_loss(F.log_softmax(logits, -1).view(-1, V), labels.view(-1))

After::

    loss, lse, number = coda_inductor.cross_entropy(logits, labels, -100, 0.0, "mean", dtype)

Why it is valid: the cast and the view only change precision and shape; the op computes every row in
float32 (float64 for float64).

What it enables: there is no float32 copy of the logits. The log-sum-exp of each row leaves the LM
head's epilogue as partials (rule R7), and in the backward pass the gradient of the logits is
computed and used one slice of the vocabulary at a time (``coda_inductor.rewrite.loss.slices``).

Refuses: class weights; targets that are probabilities; classes in another dimension than the last;
options that are not constants.
"""

import torch
import torch.nn.functional as F

from coda_inductor import Match, Pattern, value
from coda_inductor.patterns.conditions import constant, number
from coda_inductor.refusal import refuse
from coda_inductor.semantic import cross_entropy


def flattened(logits, target, ignore_index, reduction, label_smoothing, rows, columns):
    rows_of_logits = logits.view(rows, columns)
    return plain(rows_of_logits, target, ignore_index, reduction, label_smoothing)


def merged(logits, target, ignore_index, reduction, label_smoothing, first, last):
    rows_of_logits = logits.flatten(first, last)
    return plain(rows_of_logits, target, ignore_index, reduction, label_smoothing)


def plain(logits, target, ignore_index, reduction, label_smoothing):
    return F.cross_entropy(
        logits,
        target,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def likelihood(logits, target, ignore_index, reduction):
    return F.nll_loss(
        F.log_softmax(logits, -1), target, ignore_index=ignore_index, reduction=reduction
    )


def likelihood_flattened(logits, target, ignore_index, reduction, rows, columns):
    return likelihood(logits.view(rows, columns), target, ignore_index, reduction)


def likelihood_of_rows(logits, target, ignore_index, reduction, rows, columns):
    chances = F.log_softmax(logits, -1).view(rows, columns)
    return F.nll_loss(chances, target, ignore_index=ignore_index, reduction=reduction)


def _arguments(match: Match):
    logits, target, reduction = (match.bound[name] for name in ("logits", "target", "reduction"))
    smoothed = "label_smoothing" in match.bound
    smoothing = number(match, "label_smoothing") if smoothed else 0.0
    ignored = int(number(match, "ignore_index"))
    return (logits, target, ignored, smoothing, reduction, value(match.root).dtype)


def _classes_last(match: Match):
    logits, target = value(match.bound["logits"]), value(match.bound["target"])
    rows = value(match.root.args[0] if match.root.args else match.root.kwargs["input"])
    if not all(isinstance(t, torch.Tensor) for t in (logits, target, rows)):
        return refuse("idiom-form", "the shape of the logits or targets is unknown")
    if target.is_floating_point():
        return refuse("loss-targets", "the targets are probabilities, not classes")
    if rows.dim() != 2 or target.dim() != 1 or logits.shape[-1] != rows.shape[-1]:
        text = f"the logits {tuple(rows.shape)} do not have their classes in the last dimension"
        return refuse("loss-targets", text)
    return None


def _examples():
    """Three classes, rows of each and an ignored one; with every reduction, with smoothing and
    without (0.75 / 3, which torch computes, is exact)."""
    target = torch.tensor([2, -100, 0, 1])
    for reduction, smoothing in (("none", 0.0), ("none", 0.75), ("sum", 0.75), ("mean", 0.0)):
        options = {"ignore_index": -100, "reduction": reduction, "label_smoothing": smoothing}
        plain = {"logits": (4, 3), "target": target, **options}
        batched, viewed = {**plain, "logits": (2, 2, 3)}, {"rows": 4, "columns": 3}
        yield from (plain, batched | viewed, batched | {"first": 0, "last": 1})
        if not smoothing:  # which log-likelihoods do not have
            plain, batched = ({**example} for example in (plain, batched))
            del plain["label_smoothing"], batched["label_smoothing"]
            yield from (plain, batched | viewed)


PATTERN = Pattern(
    name="cross_entropy",
    idioms=(flattened, merged, plain, likelihood_of_rows, likelihood_flattened, likelihood),
    op=cross_entropy,
    arguments=_arguments,
    conditions=(_classes_last, constant("ignore_index", "reduction", "label_smoothing")),
    result=0,
    example=tuple(_examples()),
)
