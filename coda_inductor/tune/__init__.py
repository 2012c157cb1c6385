# SPDX-License-Identifier: Apache-2.0
"""Measure sites, once per GPU model and user.

tuner    the interface for a compilation: measure these sites, within a number of seconds
worker   the measuring process: it may crash, hang or run out of memory without harm
timing   interleaved timing, with a cold cache and a warm clock
inputs   tensors with the shapes and dtypes of a site's
"""
