# SPDX-License-Identifier: Apache-2.0
"""For mkdocs: a link to a file of the checkout that the site lacks becomes its text."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?:benchmarks/|CONTRIBUTING)[^)]*\)")


def on_page_markdown(markdown: str, **_context: Any) -> str:
    """Called by mkdocs for each page."""
    return _OUTSIDE.sub(r"\1", markdown)
