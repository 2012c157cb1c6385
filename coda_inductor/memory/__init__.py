# SPDX-License-Identifier: Apache-2.0
"""Choose which tensors are kept for the backward pass, and which are computed again.

- ``costs``: FLOP of our ops, for torch's FLOP counter; expected milliseconds of any node
- ``limit``: the memory that the user allows, by an option, torch's budget, or a policy; the bytes
  that a peak leaves for a step, on which several ranks agree
- ``candidates``: kept tensors, and the products that would run again for each
- ``halves``: one product of a pair, computed again alone
- ``peak``: the memory of a step over time, for a choice
- ``planner``: the cheapest choice within the limit
- ``updates``: weights are updated where their gradients are known
- ``partition``: Inductor's hook, which applies the choice

This room reads joint graphs after fusion and knows no pattern: it asks each node for its time and
its bytes, and leaves the split itself to torch's partitioner.
"""
