# SPDX-License-Identifier: Apache-2.0
"""A process of its own without the seconds that importing torch takes: a fork.

For programs that a test starts, which import first and have compiled nothing. The test's own
process has threads, and is not forked.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def apart(work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call ``work`` in a fork of this process; an error there, which it prints, is one here."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            work(*args, **kwargs)
            status = 0
        except BaseException:  # noqa: BLE001 (this process must not run its parent's code)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(f"exit status {code}")
