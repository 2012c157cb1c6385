# SPDX-License-Identifier: Apache-2.0
"""Sites are measured, once for a GPU model, and everybody reads the result.

tuner    what a compilation asks: measure these sites, within so many seconds
worker   that process: it may crash, hang or run out of memory, and costs nobody anything
timing   interleaved, from a cold cache, with the clock warm
inputs   tensors as a site would have them
"""
