# SPDX-License-Identifier: Apache-2.0
"""What runs at a site, and how long it is expected to take. No module here runs kernels.

site          what a decision is about, and the decision
device        which GPU a decision is for
config        kernel configs, and which are legal for a program
legality      can a site be a kernel at all
figures       the measurements of one site; store: where they are kept
roofline      expected times without a measurement
gate          is a fused site expected to win
choice        how one site runs, and which configs are worth a measurement
"""
