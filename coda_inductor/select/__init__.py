# SPDX-License-Identifier: Apache-2.0
"""The choice at a site, and its expected time. No module here runs kernels.

site          the subject of a decision, and the decision
device        which GPU a decision is for
config        kernel configs, and which are legal for a program
legality      can a site be a kernel at all
figures       the measurements of one site
measurements  all measurements for a GPU, and their files
roofline      expected times without a measurement
gate          is a fused site expected to win
choice        how one site runs, and which configs are worth a measurement
"""
