# SPDX-License-Identifier: Apache-2.0
"""Our own processes: compile servers and measuring processes.

child  the parent's side of such a process: start, ask, end
start  how the process begins; and the messages of both sides
"""
