# SPDX-License-Identifier: Apache-2.0
"""An explanation claims nothing that is not so: on this machine, of sizes never measured, of
fusions that cost more."""

import dataclasses
import html
import re

import torch
import torch.nn.functional as F
from subjects import Residual, explained
from torch import nn

from coda_inductor import explain
from coda_inductor.explanation.result import Explanation, Totals
from coda_inductor.refusal import refuse
from coda_inductor.report import Choice, SiteReport, time_words, traffic_words


def words(page):
    """What a reader sees of a page, but for programs."""
    page = re.sub(r"<(style|script|pre|title|desc)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_without_kernels_nothing_is_fused_or_saved():
    found, page = explained("llama, training")
    for text in (str(found), words(page)):
        assert "legal, runs as plain ops" in text
        assert not re.search(r"(?<!not )\bfused\b|\bsaved\b", text)
    assert "GEMMs fused" not in page


def test_with_kernels_they_are_called_so():
    found = Explanation("model", "cuda", training=False, sites=[site(how="kernel", refusal=None)])
    assert "absorbed 1 ops" in found.summary
    assert "GEMMs fused" in found.html()
    assert "plain ops here" not in str(found)
    assert "plain ops here" not in words(found.html())


def test_no_gemm_is_a_sentence():
    with torch.no_grad():
        found = explain(torch.relu, torch.ones(8, 16))
    assert found.summary == "There is no GEMM in it, so there is nothing to fuse."
    assert found.html()
    assert "2 GEMMs, of which none absorbs anything." in str(explained("nothing")[0])


def site(**fields):
    base = {"how": "reference", "absorbed": ("relu",), "patterns": ("epilogue",),
            "refusal": refuse("no-kernels-on-device", "device cpu has no kernels"),
            "program": explained("float32")[0].fused[0].program,
            "bytes_before": 3_000_000, "bytes_after": 2_000_000}  # fmt: skip
    return SiteReport("model.fc", (512, 512, 2048), **{**base, **fields})


def test_a_site_that_moves_more_is_marked():
    more = site(bytes_before=2_000_000, bytes_after=3_000_000)
    assert traffic_words(more) == ("2 MB -> 3 MB", "more than before")
    assert traffic_words(site()) == ("3 MB -> 2 MB", "")
    for given, marked in ((more, True), (site(), False)):
        found = Explanation("model", "cpu", training=False, sites=[given])
        table = str(found)[str(found).index("model.fc") :]
        assert (" more" in table) == ("more than before" in words(found.html())) == marked


def test_a_model_that_moves_more_or_has_more_kernels_is_marked():
    few, many = Totals(3, 1000), Totals(4, 2000)
    found = Explanation("m", "cuda", training=False, sites=[site()], before=few, after=many)
    assert "rises from 1 KB to 2 KB; kernels rise from 3 to 4" in found.summary
    assert words(found.html()).count("more than before") == 2
    found.before, found.after = many, few
    assert "more than before" not in words(found.html())
    assert "rise" not in found.summary


def test_a_block_with_more_kernels_says_so():
    found, _ = explained("TransformerEncoderLayer")  # its dropouts stand between products and norms
    assert any(after.count > before.count for before, after in found.blocks)
    assert "kernels (more than before)" in words(found.html())


def test_what_a_time_rests_on_is_said():
    slow = refuse("expected-slower", "expected 9 us fused, 8 us unfused")
    measured = Choice("kernel", fused_us=6.0, unfused_us=8.0, ground="shipped")
    assert time_words(site(estimate=measured)) == ("8.0 -> 6.0", "measured")
    roofline = dataclasses.replace(measured, ground="roofline")
    assert time_words(site(estimate=roofline))[1] == "about: a roofline, not measured"
    left = dataclasses.replace(measured, fused_us=9.0, refusal=slow)
    assert "slower: the gate leaves it to cuBLAS" in time_words(site(estimate=left))[1]
    asked = dataclasses.replace(left, refusal=None)
    assert "slower: the gate was not asked" in time_words(site(estimate=asked))[1]


def test_weight_gradients_without_work_are_one_line():
    found, page = explained("llama, training")
    idle = [s for s in found.sites if s.idle]
    assert len(idle) == 15
    assert not [row for row in found.rows if row.site.idle]
    line = "and 15 weight gradients that have nothing to absorb"
    assert line in str(found)
    assert line in words(page)
    assert "turns the tile" not in words(page)


def test_only_the_kernel_that_adds_is_called_a_residual():
    with torch.no_grad():
        found = explain(Residual().bfloat16(), torch.ones(32, 64, dtype=torch.bfloat16))
    (before, _after) = found.blocks[0]
    assert before.parts[-1].title.startswith("residual")
    for name in ("GPT-2", "llama"):
        small = [p.title for pair in explained(name)[0].blocks for p in pair[1].parts]
        assert "finish row statistics" in small
        assert "residual + finish row statistics" not in small


def test_a_loss_on_meta_tensors_has_nothing_to_compare_with():
    """Torch has no gradient of it there: without our passes the backward pass is empty."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head = nn.Linear(64, 128), nn.Linear(128, 256)

        def forward(self, x, labels):
            return F.cross_entropy(self.head(F.gelu(self.up(x))), labels)

    said = {}
    for device in ("cpu", "meta"):
        x = torch.zeros(32, 64, device=device)
        labels = torch.zeros(32, dtype=torch.int64, device=device)
        said[device] = explain(Classifier().to(device), x, labels)
    assert said["cpu"].comparable
    assert "memory traffic" in said["cpu"].summary
    assert not said["meta"].comparable
    assert "nothing to compare it with" in said["meta"].summary
    assert any("Torch itself finds no gradient" in note for note in said["meta"].notes)
