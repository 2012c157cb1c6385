# SPDX-License-Identifier: Apache-2.0
"""What a user can do about each reason for which an attention call stays as it is. Rows of
``remedies``'s table: the text of a reason, as a regular expression, and the remedy."""

from __future__ import annotations

#: The project's own limits, or how the model is: nothing that a user should change.
NOTHING = "Nothing to do"

ROWS: tuple[tuple[str, str], ...] = (
    # masks: the first line wraps
    (r"^the mask stays, (?P<inner>.*)$", ""),
    (
        r"^it depends on ",
        (
            f"{NOTHING} if the mask holds data (padding, packed documents). Without padding, pass "
            "no mask: a causal model needs none."
        ),
    ),
    (
        r"^its size is symbolic",
        (
            "Build the mask by comparing torch.arange's, compile with dynamic=False, or pad "
            "sequences to a few fixed lengths."
        ),
    ),
    (
        r"^a sliding window of|^it is constant, but neither|^it hides keys from all",
        f"{NOTHING}: scaled_dot_product_attention has no flag for such a mask.",
    ),
    (
        r"^it is not full, and there are",
        f"{NOTHING}: with other queries than keys, causal means something else to SDPA.",
    ),
    (
        r"^it adds numbers other than|is neither boolean nor additive",
        f"{NOTHING}: the mask is a bias, which SDPA adds.",
    ),
    (r"^an in-place op changes it", "Build the mask out of place (torch.where, logical_and)."),
    (r"draws random numbers", f"{NOTHING}: the mask is another one at every call."),
    (
        (
            r"^is_causal is set beside it|^it is no tensor of this graph|^it comes from elsewhere"
            r"|^it has more than \d+ elements|^it takes more than \d+ MiB|^it cannot be evaluated"
            r"|^evaluating it failed"
        ),
        f"{NOTHING}: the mask's values are not known while compiling.",
    ),
    # repeated heads
    (
        r"may change in place what is repeated|changes the mode of gradients or autocast before",
        "Repeat the heads right before the call, from keys and values that nothing writes to.",
    ),
)
