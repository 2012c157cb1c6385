# SPDX-License-Identifier: Apache-2.0
"""What the matcher reads of one node: its op in the common dialect."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node


class Canon(NamedTuple):
    """A node in the common dialect: op name and its significant arguments. ``through``: nodes
    between the node and its arguments that are part of the op."""

    op: str
    args: tuple[Any, ...]
    through: tuple[Node, ...] = ()
