# SPDX-License-Identifier: Apache-2.0
"""An explanation as one HTML page: everything inlined, nothing fetched."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

import coda_inductor
from coda_inductor.codegen.render import render as render_kernel
from coda_inductor.errors import KernelError
from coda_inductor.explanation.block import Block
from coda_inductor.explanation.diagram import draw, render
from coda_inductor.explanation.folding import Row, general_path
from coda_inductor.explanation.naming import (
    epilogue_work,
    readable_bytes,
    shape_text,
    time_words,
    traffic_words,
)
from coda_inductor.explanation.result import Explanation, Saved, places
from coda_inductor.mainloop.usage import usage
from coda_inductor.program import EpilogueProgram
from coda_inductor.report import SiteReport
from coda_inductor.runtime import pool
from coda_inductor.select.config import Config
from coda_inductor.select.device import Gpu, gpu_of
from coda_inductor.select.division import divide

_TEMPLATES = Path(__file__).with_name("templates")
#: Drawings wider than this stand below each other, not side by side.
_HALF_PAGE = 690
_ROLES = {"forward": "Forward", "input gradient": "Backward", "weight gradient": "Backward"}


@dataclass(frozen=True)
class Source:
    """One distinct program: its text, its kernel's source (highlighted) and who runs it."""

    key: str
    title: str
    work: str
    text: str
    kernel: Markup
    config: str
    times: int


@dataclass(frozen=True)
class Figure:
    """A block before and after, drawn."""

    title: str
    before: Markup
    after: Markup
    facts: tuple[str, str]
    stacked: bool


def page(explanation: Explanation) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = readable_bytes
    environment.filters["path"] = _breakable
    groups: dict[str, list[Row]] = {}
    for row in explanation.rows:
        groups.setdefault(_ROLES[row.site.role], []).append(row)
    return environment.get_template("page.html.j2").render(
        e=explanation,
        css=_own("style.css") + _code_css(),
        js=_own("page.js"),
        versions=f"coda_inductor {coda_inductor.__version__}, torch {torch.__version__}",
        figures=[_figure(before, after) for before, after in explanation.blocks],
        groups=groups,
        shape=shape_text,
        work=epilogue_work,
        time=time_words,
        traffic=traffic_words,
        places=places,
        sources=_sources(explanation.rows, gpu_of(explanation.device)),
        saved=_saved_rows(explanation.saved_before, explanation.saved_after),
    )


def _own(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704 (a file of ours)


def _figure(before: Block, after: Block) -> Figure:
    where = before.name or "the whole model"
    title = f"{before.direction.capitalize()}: {where}"
    drawings = draw(before), draw(after)
    texts = [
        Markup(render(d, f"{title}, {when}"))  # noqa: S704 (our own SVG, its texts are escaped)
        for d, when in zip(drawings, ("before", "after"), strict=True)
    ]
    facts = (_facts(before, before), _facts(after, before))
    stacked = max(d.width for d in drawings) > _HALF_PAGE
    return Figure(title, texts[0], texts[1], facts, stacked)


def _facts(block: Block, before: Block) -> str:
    kernels = " (more than before)" if block.count > before.count else ""
    moved = " (more than before)" if block.moved > before.moved else ""
    return f"{block.count} kernels{kernels}, {readable_bytes(block.moved)} through memory{moved}"


def _config_words(site: SiteReport, gpu: Gpu) -> str:
    """``128x192:2x1:pp: 1280 tiles in 10 waves, ...``; empty where no config was asked for."""
    config = site.estimate.config if site.estimate else site.config
    if not config or site.program is None:
        return ""
    m, n, _ = site.shape
    division = divide(site.program, Config.parse(config), m, n, gpu)
    return f"{config} at {shape_text(site)}: {division}{_spilled(site.program, config, gpu)}"


def _spilled(program: EpilogueProgram, config: str, gpu: Gpu) -> str:
    """What the kernel's object file says of its registers, if it was compiled before."""
    files = pool.compiled(program.to_json(), config, "{}{}".format(*gpu.capability))
    known = [found for found in map(usage, files) if found is not None]
    return f"; {max(known, key=lambda use: use.spilled)}" if known else ""


def _sources(rows: list[Row], gpu: Gpu) -> list[Source]:
    programs: dict[str, list[Row]] = {}
    for row in rows:
        if row.site.program is not None:
            programs.setdefault(row.site.program.key, []).append(row)
    found = []
    for key, users in programs.items():
        site = users[0].site
        assert site.program is not None, "only rows with a program are here"
        configs = dict.fromkeys(_config_words(row.site, gpu) for row in users)
        found.append(
            Source(
                key,
                ", ".join(dict.fromkeys(row.name for row in users)),
                ", ".join(epilogue_work(site)),
                str(site.program),
                _kernel(site.program),
                "; ".join(filter(None, configs)),
                sum(row.times for row in users),
            )
        )
    return found


def _kernel(program: EpilogueProgram) -> Markup:
    try:
        source = render_kernel(program)
    except KernelError as error:
        source = f"# no kernel: {error}\n"
    return Markup(highlight(source, PythonLexer(), HtmlFormatter(nowrap=True)))  # noqa: S704 (escapes)


def _code_css() -> Markup:
    light = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
    plain = ".code { background: var(--code); color: var(--ink); }"
    text = f"\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{plain}\n"
    return Markup(text)  # noqa: S704 (pygments' own styles)


def _breakable(path: str) -> Markup:
    """A dotted path that may break after its dots."""
    return (
        Markup("<wbr>").join(f"{part}." for part in path.split(".")[:-1])
        + Markup("<wbr>")
        + (path.rpartition(".")[2])
    )


def _saved_rows(before: list[Saved], after: list[Saved]) -> list[dict[str, Any]]:
    """Kept tensors by module (layers folded), shape and dtype: how many and how large."""
    counts: dict[tuple[str, tuple[int, ...], str], Counter[str]] = {}
    for when, tensors in (("before", before), ("after", after)):
        for tensor in tensors:
            where = general_path(f"{tensor.where}.").rstrip(".") or tensor.name
            found = counts.setdefault((where, tensor.shape, tensor.dtype), Counter())
            found[when] += 1
            found[f"{when} bytes"] += tensor.bytes
    rows = [
        {
            "where": where,
            "shape": " x ".join(map(str, shape)) or "scalar",
            "dtype": dtype,
            "before": found["before"],
            "after": found["after"],
            "bytes_before": found["before bytes"],
            "bytes_after": found["after bytes"],
        }
        for (where, shape, dtype), found in counts.items()
    ]
    return sorted(rows, key=lambda r: -max(r["bytes_before"], r["bytes_after"]))
