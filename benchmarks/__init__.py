# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: ``python -m benchmarks NAME``, each of which its module describes.

headline, first    sustained steps, and cold first ones, under torch.compile and coda
whole, curve       how whole models train: speed and peak, and what they learn
trainers           whole steps and losses of TRL's trainers
memory             time against peaks
account            where a step goes, to the last kernel
worth              a step without each feature
dit, paper         diffusion transformers, and the paper's kernels
sweep              writes the shipped tables
models, worth_models, experts    what is measured
measure, energy, environment     errors and peaks, joules, versions
"""
