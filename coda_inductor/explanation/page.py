# SPDX-License-Identifier: Apache-2.0
"""Render an explanation as one HTML page, which loads nothing from elsewhere."""

from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

import coda_inductor
from coda_inductor import table
from coda_inductor.explanation.result import Explanation, common_text, locations
from coda_inductor.kernels import render
from coda_inductor.program import EpilogueProgram

_TEMPLATES = Path(__file__).with_name("templates")


def page(explanation: Explanation) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["bytes"] = table.readable_bytes
    environment.filters["arrow"] = lambda text: text.replace(
        " -> ", "\N{NO-BREAK SPACE}\N{RIGHTWARDS ARROW}\N{NO-BREAK SPACE}"
    )
    environment.filters["path"] = lambda path: Markup(".<wbr>").join(path.split("."))
    return environment.get_template("page.html.j2").render(
        e=explanation, css=_read_own("style.css") + _code_css(), js=_read_own("page.js"),
        versions=f"coda_inductor {coda_inductor.__version__}, torch {torch.__version__}",
        table=table, locations=locations, common_text=common_text,
        sources=_sources(explanation.rows),
    )  # fmt: skip


def _read_own(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704 (a file of ours)


def _sources(rows: list[table.Row]) -> list[dict[str, Any]]:
    """Each distinct program: its text, its kernel's source (highlighted) and its sites."""
    programs: dict[EpilogueProgram, list[table.Row]] = {}
    for row in rows:
        if row.site.program is not None:
            programs.setdefault(row.site.program, []).append(row)
    formats = PythonLexer(), HtmlFormatter(nowrap=True)
    return [
        {
            "key": program.key,
            "title": ", ".join(dict.fromkeys(row.name for row in users)),
            "text": str(program),
            "kernel": Markup(highlight(render(program), *formats)),  # noqa: S704 (escapes)
            "configs": ", ".join(dict.fromkeys(filter(None, (row.site.config for row in users)))),
            "times": sum(row.times for row in users),
        }
        for program, users in programs.items()
    ]


def _code_css() -> Markup:
    light = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
    plain = ".code { background: var(--code); color: var(--ink); }"
    text = f"\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{plain}\n"
    return Markup(text)  # noqa: S704 (pygments' own styles)
