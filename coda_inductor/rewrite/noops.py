# SPDX-License-Identifier: Apache-2.0
"""Full slices and clones that change nothing would hide idioms from us. Inductor removes them, but
after our hook."""

from __future__ import annotations

from torch.fx import Graph

from coda_inductor.compat import remove_noop_ops
from coda_inductor.log import logger
from coda_inductor.record import Record


def remove_noops(graph: Graph, _record: Record) -> None:
    """Apply Inductor's own pass, in place."""
    try:
        remove_noop_ops(graph)
    except Exception:  # a private helper of Inductor's: losing it costs a fusion, not correctness
        logger.debug("remove_noop_ops failed", exc_info=True)
