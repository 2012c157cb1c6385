# SPDX-License-Identifier: Apache-2.0
"""``benchmarks paper``: the page and the picture, of made-up measurements."""

import re

from benchmarks.paper_page import baseline, write


def _variant(ms: float, modes: str = "forward backward step") -> dict:
    return {m: {"median_ms": ms, "error": 0.004, "peak_mib": 512.0} for m in modes.split()}


FOUND = {
    "environment": {"gpu": "G", "date": "2026-01-02T", "commit": "c", "command": "x",
                    "versions": {"torch": "2"}},
    "results": {
        "residual 2048": {
            "errors": {"flashinfer, backward": "NotImplementedError: no backward"},
            "variants": {"compile": _variant(3.0), "max_autotune": _variant(2.0),
                         "coda": _variant(1.6), "flashinfer": _variant(2.5, "forward")},
        },
        "head 2048": {"errors": {}, "variants": {"coda": _variant(1.0)}},
    },
}  # fmt: skip


def test_the_page_and_its_picture_compare_with_the_faster_torch_compile(tmp_path):
    write(FOUND, "made_up.json", tmp_path / "results" / "paper.md")

    page = (tmp_path / "results" / "paper.md").read_text()
    words = re.findall(r">([^<>]+)</text>", (tmp_path / "results" / "paper.svg").read_text())
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert ["residual 2048", "3.000", "2.000", "1.600", "2.500", "1.25"] in cells
    assert ["residual 2048", "3.000", "2.000", "1.600", "-", "1.25"] in cells
    assert ["head 2048", "-", "-", "1.000", "-", "-"] in cells
    assert ["residual 2048", "0.50", "0.50", "0.50", "-"] in cells
    assert "- residual 2048, flashinfer, backward: NotImplementedError: no backward" in page
    assert words.count("1.25") == 2
    assert words.count("0.80") == 1
    assert baseline(FOUND["results"]["head 2048"], "forward") is None
