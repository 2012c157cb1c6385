# SPDX-License-Identifier: Apache-2.0
"""Our own processes, which compile kernels or measure them.

child  the parent's side of such a process: start, ask, end
start  the start of the process, and the messages of both sides
"""
