# SPDX-License-Identifier: Apache-2.0
"""What runs at a site, and how long it is expected to take. Nothing here runs anything.

device        which GPU a decision is for
config        kernel configs, and which are legal for a program
division      how a config divides a site's work among the processors
legality      can a site be a kernel at all
kinds         the programs that were measured
model         expected times, from the measurements and a model fitted to them
instructions  what an epilogue costs beyond its traffic
gate          is a fused site expected to win
policy        all of it, asked of a graph
"""
