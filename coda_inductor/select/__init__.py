# SPDX-License-Identifier: Apache-2.0
"""What runs at a site, and how long it is expected to take. Nothing here runs anything.

device        which GPU a decision is for
config        kernel configs, and which are legal for a program
legality      can a site be a kernel at all
figures       what was measured of one site; store: where that is kept
roofline      expected times of what was not measured
gate          is a fused site expected to win
choice        how one site runs, and which configs are worth a measurement
"""
