# SPDX-License-Identifier: Apache-2.0
"""Processes of our own beside the user's: compile servers, what measures, what proves.

child  such a process as this one sees it: started, asked, ended
start  how it begins; and what both sides say
"""
