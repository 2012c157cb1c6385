# SPDX-License-Identifier: Apache-2.0
"""Match plain PyTorch functions in Dynamo graphs.

columns    selected and joined columns of a tensor, in one dialect
normalize  one dialect for the many spellings of an op
guards     which nodes change memory or a mode
hazards    changes of memory or mode in the middle of an idiom
match      the matcher
bodies     the graphs inside a graph
"""

from coda_inductor.graph.nodes import fake as value
from coda_inductor.matching.bodies import Body, bodies
from coda_inductor.matching.guards import changes, forward_mode, memory, move, replace, writes_to
from coda_inductor.matching.hazards import Hazards
from coda_inductor.matching.match import Flat, Idiom, Match, first_match, match_ops
from coda_inductor.matching.normalize import normalize

__all__ = [
    "Body", "Flat", "Hazards", "Idiom", "Match", "bodies", "changes", "first_match",
    "forward_mode", "match_ops", "memory", "move", "normalize", "replace", "value", "writes_to",
]  # fmt: skip
