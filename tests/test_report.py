# SPDX-License-Identifier: Apache-2.0
"""The line of a compiled graph: what ran, what could, what has nothing to do. Every reason has a
code, every code a remedy, every remedy a use: no sentence is read."""

import dataclasses
import re
from pathlib import Path

import pytest

from coda_inductor.refusal import refuse
from coda_inductor.remedies import REMEDIES
from coda_inductor.report import Choice, GraphReport, SiteReport
from coda_inductor.table import fold

NO_KERNELS = refuse("no-kernels-on-device", "device cpu has no kernels")
KERNEL = SiteReport(
    "a", (8, 8, 8), choice=Choice("kernel"), bytes_before=3_000_000, bytes_after=1_000_000
)
LEGAL = SiteReport("b", (8, 8, 8), choice=Choice("reference", refusal=NO_KERNELS))
PLAIN = SiteReport("c", (8, 8, 8))


def refused(text, code="no-gain"):
    return Choice("unfused", refusal=refuse(code, text))


def gradient(code):
    return SiteReport("d", (8, 8, 8), role="weight gradient", choice=refused("this or that", code))


def test_the_line_says_what_runs():
    legal = "1 of 2 GEMMs may be fused, and run as plain ops: device cpu has no kernels"
    small = [
        dataclasses.replace(PLAIN, choice=refused(f"layers.{i} takes 0.{i} us")) for i in (1, 2)
    ]
    most = [*small, gradient("no-neighbours")]
    for sites, text in (
        ([KERNEL, PLAIN], "1 of 2 GEMMs fused"),
        ([PLAIN], "0 of 1 GEMMs fused"),
        (most, "0 of 3 GEMMs fused, 2 because: layers.* takes 0.1 us"),
        (small, "0 of 2 GEMMs fused, all because: layers.* takes 0.1 us"),
        ([KERNEL, *small], "1 of 3 GEMMs fused"),
        ([KERNEL, LEGAL], f"1 of 2 GEMMs fused, {legal}"),
        ([], "no GEMM in this graph"),
    ):
        assert GraphReport("g", sites).summary == text


def test_a_row_of_several_layers_names_none_of_them():
    """It said "attention in model.layers.1.self_attn reads it" in the row of two layers."""
    sites = [
        SiteReport(f"layers.{i}.o", (8,), choice=refused(f"layers.{i} reads it")) for i in (0, 1)
    ]
    (row,) = fold(sites)
    assert row.reason == "layers.* reads it"
    (row,) = fold(sites[:1])
    assert row.reason == "layers.0 reads it"


ROOT = Path(__file__).resolve().parents[1]
#: Where codes are read, not given.
READERS = {ROOT / "coda_inductor" / name for name in ("remedies.py", "report.py")}
#: Codes that are written where they are given: one, or either of two.
GIVEN = re.compile(
    r"""(?<![.\w])(?:refuse|Refusal)\(\s*"([^"]+)"(?:\sif\s[^"]*\selse\s"([^"]+)")?"""
)


def test_every_code_has_a_remedy_and_every_remedy_a_use():
    paths = {p for folder in ("coda_inductor", "patterns") for p in (ROOT / folder).rglob("*.py")}
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths - READERS)
    given = {code for codes in GIVEN.findall(text) for code in codes if code}
    assert len(given) > 50
    assert given <= set(REMEDIES)
    assert not [code for code in REMEDIES if f'"{code}"' not in text]


def test_the_remedy_hangs_on_the_code_whatever_the_text():
    inner = refuse("not-multiple-of-8", "something else entirely")
    outer = inner.within("its GEMM mm is not fused: {}").at("rms_norm", "model.norm")
    assert outer.remedy is REMEDIES["not-multiple-of-8"]
    with pytest.raises(KeyError):
        refuse("the-moon-is-full", "the moon is full")
