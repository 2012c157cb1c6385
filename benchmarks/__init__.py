# SPDX-License-Identifier: Apache-2.0
"""The benchmark suite: ``python -m benchmarks NAME``; NAME is a suite, or what one command does.

run           the command line of a suite, and the process of a case
contest       one case, torch.compile and ours interleaved
layer, families    what the suites measure; models, gradients: of what
report        results -> tables
headline, first    sustained steps, and cold first ones, under torch.compile and coda
account       where a step goes, to the last kernel
distributed_job, wrapped    several GPUs, under torchrun
sweep, sites  measure what the shipped tables hold
measure, energy, environment    timers, joules, versions
"""
