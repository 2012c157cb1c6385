# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of FP8 run and write what they say, at sizes for CPUs."""

from __future__ import annotations

import functools
import json

import torch
from benchmark_runs import benchmarks  # noqa: F401 (it finds the package)

from benchmarks import fp8_casts


def test_casts_are_timed_beside_inductors(tmp_path, capsys, monkeypatch):
    ahead = functools.partial(torch.compile, backend="aot_eager")  # C++ takes 2 s a function
    monkeypatch.setattr(fp8_casts, "compiled", ahead)
    out = tmp_path / "casts.json"
    fp8_casts.main([str(out)], [(33, 48)], 3)
    written = json.loads(out.read_text())
    assert written["environment"]["versions"]["torch"] == torch.__version__
    found = written["results"]["33 x 48"]
    assert list(found) == ["cast", "cast row", "amax", "rowwise", "tensorwise"]
    for variants in found.values():
        assert list(variants) == ["ours", "inductor"]
        assert all(figures["us"] > 0 for figures in variants.values())
    assert capsys.readouterr().out.count("GB/s") == 2 * len(found)


def test_bytes_are_by_the_median():
    figures = fp8_casts.figures([0.001, 0.002, 0.009], 4_000_000)
    assert figures == {"us": 2.0, "p20_us": 1.0, "p80_us": 9.0, "gb_per_s": 2000.0}


def test_both_variants_compute_the_same():
    x = torch.randn(40, 72).bfloat16()
    for ours, theirs in (
        (fp8_casts.our_rowwise, fp8_casts.their_rowwise),
        (fp8_casts.our_tensorwise, fp8_casts.their_tensorwise),
    ):
        for a, b in zip(ours(x), theirs(x), strict=True):
            assert torch.equal(a.float(), b.float())
