# SPDX-License-Identifier: Apache-2.0
"""The benchmark suite: ``python -m benchmarks NAME``; NAME is a suite, or what one command does.

run           the command line of a suite, and the process of a case
families      what the suite measures; models: of what
report        results -> tables
headline, first    sustained steps, and cold first ones, under torch.compile and coda
whole, curve  how whole models train: speed and peak, and what is learnt
account       where a step goes, to the last kernel
sweep         what the shipped tables hold
measure, energy, environment    timers, joules, versions
"""
