"""Matching plain PyTorch functions in Dynamo graphs.

normalize  one dialect for the many spellings of an op
guards     mutations and mode changes that an idiom must not straddle
match      the matcher
"""

from coda_inductor.matching.guards import epochs, mutates
from coda_inductor.matching.match import Idiom, Match
from coda_inductor.matching.normalize import normalize, value

__all__ = ["Idiom", "Match", "epochs", "mutates", "normalize", "value"]
