# SPDX-License-Identifier: Apache-2.0
"""What follows from a measurement, and by what it is found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from measured import figures, site
from programs import kinds

from coda_inductor.program import Step
from coda_inductor.select.figures import from_row, key_of, rows_class, signature, to_row


def test_the_first_in_order_of_those_that_are_equal():
    """Within the spread, or within what two runs of one config differ by."""
    found = figures({"c": 100.0, "b": 101.9, "a": 102.1}, spread=0.02)
    assert found.best(["a", "b", "c"]) == "b"
    calm = figures({"c": 100.0, "b": 101.4, "a": 101.6})
    assert calm.best(["a", "b", "c"]) == "b"
    assert found.best(["c", "b", "a"]) == "c"
    assert found.best(["a"]) == "a"
    assert found.best(["unknown", "a", "c"]) == "c"
    assert found.best(["unknown"]) is None


def test_what_counts_as_equal_has_bounds_and_to_win_takes_more():
    for spread, counts in ((-1.0, 0.005), (0.004, 0.005), (0.01, 0.01), (0.5, 0.03)):
        assert figures({}, spread=spread).tolerance == counts
    found = figures({}, spread=0.02)
    assert found.wins(98.0, 100.0)
    assert not found.wins(98.1, 100.0)
    assert not figures({}).wins(99.9, 100.0)
    assert figures({}).wins(99.5, 100.0)


def test_classes_of_rows_follow_each_other():
    known = {1: 16, 16: 16, 17: 32, 33: 64, 65: 128, 129: 256, 257: 384, 1000: 1024, 5000: 5120,
             8192: 8192, 8193: 8448, 16385: 16896, 32769: 33792}  # fmt: skip
    assert {m: rows_class(m) for m in known} == known
    classes = [rows_class(m) for m in range(1, 40000)]
    assert classes == sorted(classes)
    assert all(m <= found <= m + max(m // 32, 128) for m, found in enumerate(classes, 1))
    assert all(rows_class(found) == found for found in set(classes))


def test_what_a_measurement_is_of():
    one = site()
    others = [
        {}, {"program": kinds()["rms_partial"]}, {"program": kinds("float16")["scale"]},
        {"m": 4096}, {"n": 4096}, {"k": 4096}, {"terms": 2}, {"copied": (1024, 1024)},
        {"copied": (512, 1536)}, {"a_major": "m"}, {"b_major": "n"},
    ]  # fmt: skip
    assert len({key_of(replace(one, **other)) for other in others}) == len(others)
    for same in (
        {"name": "layers.3.mlp"}, {"device": torch.device("cuda", 1)}, {"crowded": True},
        {"after": frozenset({"out0"})},
    ):  # fmt: skip
        assert key_of(replace(one, **same)) == key_of(one)
    assert key_of(site(m=5000)) == key_of(site(m=5120)) != key_of(site(m=5121))


def test_programs_are_alike_that_move_the_same_bytes_and_reduce_alike():
    found = {name: signature(program) for name, program in kinds().items()}
    assert found.pop("norm_bwd_joined") == found["norm_bwd"]
    assert len(set(found.values())) == len(found)
    assert found["dswiglu"] == "1 bfloat16 4+6 row-add"
    steps = (*kinds()["dswiglu"].steps, Step("more", "neg", ("y",)))
    assert signature(replace(kinds()["dswiglu"], steps=steps)) == found["dswiglu"]
    assert signature(kinds("float16")["scale"]) != found["scale"]


def full():
    return figures(
        {"128x128:2x1:pp": 10.5, "128x192:1x1:pp": 11.0},
        spread=0.0123,
        failed={"64x64:1x1:co": "wrong: out0"},
        m=5000,
        name="mlp.gate_proj + up_proj",
        like="2 bfloat16 0+2",
    )


def test_a_row_says_everything_that_must_be_said():
    for found in (full(), figures({"128x128:2x1:pp": 1.0})):
        row = json.loads(json.dumps(to_row("some key", found)))
        assert from_row(row) == ("some key", found)
    row = to_row("key", full())
    del row["failed"], row["name"], row["like"]
    assert from_row(row)[1] == replace(full(), failed={}, name="", like="")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, "fast", None, [1]])
@pytest.mark.parametrize("name", ["us", "unfused", "plain"])
def test_rubbish_is_no_time(name, value):
    row = to_row("key", full())
    row[name] = {"128x128:2x1:pp": value} if name == "us" else value
    with pytest.raises((TypeError, ValueError)):
        from_row(row)
