# SPDX-License-Identifier: Apache-2.0
"""Checks of the harness: one that waits for ever, and one behind it."""

from __future__ import annotations

import time


def check_that_hangs():
    time.sleep(1000)


def check_behind_it():
    pass
