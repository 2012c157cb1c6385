# SPDX-License-Identifier: Apache-2.0
"""Choose how a site runs, and estimate its time. No module here runs kernels.

site          a program with its sizes and surroundings, and the choice for it
config        kernel configs, and the legal ones for a program
legality      can a site be a kernel?
figures       the measurements of one site
measurements  all measurements for a GPU, and their files
roofline      expected times without a measurement
choice        the choice for a site: may a kernel win, and which configs are worth a measurement
"""
