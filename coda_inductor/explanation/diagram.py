# SPDX-License-Identifier: Apache-2.0
"""Draw a block as SVG: boxes for kernels, arrows for the tensors that travel through memory.

Colour says what a kernel is limited by: blue is a matrix product, orange memory-bound work,
wherever it happens: a box of its own before, a chip inside a GEMM's box after. An arrow is as wide
as the root of its bytes. Colours are CSS variables, so that one drawing serves light and dark.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from coda_inductor.explanation.block import Block, Part
from coda_inductor.explanation.layout import Box, Edge, layout
from coda_inductor.explanation.naming import readable_bytes

TITLE, SMALL = 13.0, 11.0
_PAD_X, _PAD_Y = 12.0, 9.0
_TITLE_LINE, _LINE, _CHIP = 17.0, 15.0, 19.0
_MARGIN = 10.0
_MOST_CHARS = 30
_NARROW = frozenset("ijl.,:;|!'()[] tfrI")
_WIDE = frozenset("mwMWGOQ@%")


@dataclass(frozen=True)
class Text:
    """One line of a box: ``style`` is "title", "detail", "note" or "chip"; y is its baseline."""

    text: str
    style: str
    y: float
    size: float


@dataclass
class Drawing:
    """A block laid out: what :func:`render` prints, and what tests check for overlaps."""

    block: Block
    boxes: dict[str, Box] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    texts: dict[str, list[Text]] = field(default_factory=dict)
    width: float = 0.0
    height: float = 0.0


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Upper estimate of the width of ``text`` in a sans-serif face of ``size`` pixels, from the
    widths of three classes of characters (Arial, Segoe UI, Roboto and DejaVu Sans are narrower)."""
    em = sum(0.36 if c in _NARROW else 0.92 if c in _WIDE else 0.65 for c in text)
    return em * size * (1.15 if bold else 1.0)


def draw(block: Block) -> Drawing:
    """Lay out ``block``."""
    drawing = Drawing(block)
    for part in block.parts:
        texts, width, height = _lines(part)
        drawing.texts[part.key] = texts
        drawing.boxes[part.key] = Box(part.key, width, height)
    most = max((arrow.bytes for arrow in block.arrows), default=1)
    for arrow in block.arrows:
        label = readable_bytes(arrow.bytes)
        tiny = arrow.bytes * 64 < most
        drawing.edges.append(
            Edge(
                arrow.source,
                arrow.target,
                "" if tiny else label,
                0.0 if tiny else text_width(label, SMALL) + 8,
                1.0 if tiny else 1.2 + 4.3 * (arrow.bytes / most) ** 0.5,
            )
        )
    drawing.width, drawing.height = layout(list(drawing.boxes.values()), drawing.edges)
    return drawing


def render(drawing: Drawing, title: str) -> str:
    """The SVG element. ``title`` is what a screen reader says."""
    width, height = drawing.width + 2 * _MARGIN, drawing.height + 2 * _MARGIN
    parts = {part.key: part for part in drawing.block.parts}
    described = "; ".join(
        f"{p.title}{' with ' + ', '.join(p.work) if p.work else ''}" for p in parts.values()
    )
    lines = [
        '<svg class="diagram" role="img" xmlns="http://www.w3.org/2000/svg"',
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">',
        f"<title>{escape(title)}</title><desc>{escape(described)}</desc>",
        f'<g transform="translate({_MARGIN:.0f} {_MARGIN:.0f})">',
        *(_arrow(edge) for edge in drawing.edges),
        *(_box(parts[key], box, drawing.texts[key]) for key, box in drawing.boxes.items()),
        *(_label(edge) for edge in drawing.edges if edge.label),
        "</g></svg>",
    ]
    return "\n".join(lines)


def _lines(part: Part) -> tuple[list[Text], float, float]:
    """The lines of a box, and its size."""
    small = part.kind in ("small", "outside")
    size = SMALL if small else TITLE
    y = _PAD_Y * (0.6 if small else 1.0)
    found: list[Text] = []

    def add(text: str, style: str, font: float, line: float) -> None:
        nonlocal y
        found.append(Text(text, style, y + line * 0.75, font))
        y += line

    for line in _wrap(part.title):
        add(line, "title", size, _LINE if small else _TITLE_LINE)
    if part.detail and not small:
        add(part.detail, "detail", SMALL, _LINE)
    if part.work:
        y += 4
        for work in part.work:
            add(work, "chip", SMALL, _CHIP + 3)
        y += 3
    if part.note:
        add(part.note, "note", SMALL, _LINE)
    inner = max(
        text_width(t.text, t.size, bold=t.style == "title") + (16 if t.style == "chip" else 0)
        for t in found
    )
    return found, max(inner + 2 * _PAD_X, 64.0), y + _PAD_Y * (0.6 if small else 1.0)


def _wrap(title: str) -> list[str]:
    """Long titles take several lines."""
    if len(title) <= _MOST_CHARS:
        return [title]
    lines = [""]
    for word in title.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) + 1 > _MOST_CHARS - 6:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _box(part: Part, box: Box, texts: list[Text]) -> str:
    radius = box.height / 2 if part.kind in ("small", "outside") else 8
    lines = [f'<g class="box {part.kind}">']
    hint = f"{part.title}: moves {readable_bytes(part.moved)} in all" if part.moved else part.title
    lines.append(f"<title>{escape(hint)}</title>")
    lines.append(
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="{min(radius, 14):.0f}"/>'
    )
    for text in texts:
        if text.style == "chip":
            lines.append(
                f'<rect class="chip" x="{box.x + 8:.1f}" y="{box.y + text.y - 13.5:.1f}" '
                f'width="{box.width - 16:.1f}" height="{_CHIP:.0f}" rx="5"/>'
            )
        lines.append(
            f'<text class="{text.style}" x="{box.middle:.1f}" y="{box.y + text.y:.1f}" '
            f'font-size="{text.size:.0f}">{escape(text.text)}</text>'
        )
    return "".join([*lines, "</g>"])


def _arrow(edge: Edge) -> str:
    head = 3.5 + edge.weight
    (x, y), *rest = edge.points
    path = [f"M{x:.1f} {y:.1f}"]
    end_x, end_y = rest.pop()
    for x2, y2 in (*rest, (end_x, end_y - head)):
        middle = (y + y2) / 2
        path.append(f"C{x:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}")
        x, y = x2, y2
    tip = f"M{x - head:.1f} {y:.1f}h{2 * head:.1f}l{-head:.1f} {head:.1f}z"
    return (
        f'<path class="arrow" d="{"".join(path)}" stroke-width="{edge.weight:.1f}"/>'
        f'<path class="head" d="{tip}"/>'
    )


def _label(edge: Edge) -> str:
    x, y = edge.label_at
    return (
        f'<rect class="pill" x="{x - edge.label_width / 2:.1f}" y="{y - 7.5:.1f}" '
        f'width="{edge.label_width:.1f}" height="15" rx="7"/>'
        f'<text class="bytes" x="{x:.1f}" y="{y + 4:.1f}" '
        f'font-size="{SMALL:.0f}">{escape(edge.label)}</text>'
    )
