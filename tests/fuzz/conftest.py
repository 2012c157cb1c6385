# SPDX-License-Identifier: Apache-2.0
"""At the end of a hunt (``make fuzz``): how many programs each rewrite fired in."""

import os
from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if "FUZZ" not in os.environ:
        return
    reports = [r for of in ("passed", "failed") for r in terminalreporter.getreports(of)]
    fired = Counter(name for r in reports for name in dict(r.user_properties).get("fired", ()))
    for name, times in sorted(fired.items()):
        terminalreporter.write_line(f"{name}: {times} of {len(reports)} programs")
