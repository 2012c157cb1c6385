# SPDX-License-Identifier: Apache-2.0
"""The choice of tensors that are kept for the backward pass, or computed again.

- ``costs``: FLOP of our ops, for torch's FLOP counter; expected milliseconds of any node
- ``limit``: how much memory the user allows: by an option, by torch's budget, by a policy
- ``candidates``: kept tensors, and the products that would have to run again for each
- ``halves``: one product of a pair, computed again alone
- ``peak``: the memory of a step over time, for a choice
- ``planner``: the cheapest choice within the limit
- ``partition``: Inductor's hook, which applies the choice

This room reads joint graphs after fusion and knows no pattern: it asks each node for its time and
its bytes, and leaves the split itself to torch's partitioner.
"""
