# SPDX-License-Identifier: Apache-2.0
"""The page: well-formed, self-contained, complete; tables scroll, a kernel is a card."""

import html
import re
from html.parser import HTMLParser

import pytest
import torch
from subjects import SUBJECTS, explained
from torch import nn

from coda_inductor import explain

VOID = {"meta", "br", "wbr", "link", "img", "hr", "input"}
#: Where a page may fetch something from.
FETCHES = re.compile(r"""(?:src|href)=["'](?!#)|url\(|@import|//[a-z]+\.""", re.IGNORECASE)


class Checker(HTMLParser):
    """Balance of the tags, ids and local links; the text."""

    def __init__(self):
        super().__init__()
        self.open, self.problems, self.ids, self.links, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"][1:]] if "href" in found else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        self.text.append(data)


def checked(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    return checker


@pytest.mark.parametrize("name", SUBJECTS)
def test_page_is_well_formed_self_contained_and_complete(name):
    found, page = explained(name)
    checker = checked(page)
    assert not checker.problems
    assert not checker.open
    assert len(set(checker.ids)) == len(checker.ids)
    assert set(checker.links) <= set(checker.ids)
    assert not FETCHES.search(page)
    text = "".join(checker.text)
    assert all(row.name in text for row in found.rows)
    assert all(s.program is None or f"p-{s.program.key}" in checker.ids for s in found.sites)
    assert found.summary in text
    contents = page[page.index('<nav class="toc"') : page.index("</nav>")]
    assert re.findall(r'href="#([\w-]+)"', contents) == re.findall(r'<section id="([\w-]+)"', page)
    kinds = [part.kind for pair in found.blocks for block in pair for part in block.parts]
    assert re.findall(r'<li class="card (\w+)">', page) == kinds


def test_names_are_escaped():
    model = nn.ModuleDict({"<b>&": nn.Linear(16, 16), "x": nn.ReLU()})
    with torch.no_grad():
        found = explain(lambda x: model["x"](model["<b>&"](x)), torch.ones(8, 16))
    found.name = "<i>"
    page = found.html()
    assert not checked(page).problems
    assert "<b>&" not in page
    assert "<h1>&lt;i&gt;" in page


def test_the_page_is_saved_as_one_file_and_framed_in_notebooks(tmp_path):
    found, page = explained("nothing")
    assert html.unescape(re.search(r'^<iframe.* srcdoc="([^"]*)"', found._repr_html_())[1]) == page
    assert found.save(tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
