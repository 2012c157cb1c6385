# SPDX-License-Identifier: Apache-2.0
"""Where measurements are kept, which ones count, what follows from one, and by what it is found.
Users' files have the keys of what ships: if a key changes, their measurements are lost."""

import json
from dataclasses import replace

import pytest
import torch
from measured import B200, HOPPER, borrowing, figures, keyed, site, table
from programs import kinds

from coda_inductor import cache_dir
from coda_inductor.gpu import H100, tables
from coda_inductor.program import Step
from coda_inductor.select import measurements as kept
from coda_inductor.select.figures import from_row, key_of, signature, to_row
from coda_inductor.select.measurements import Measurements, as_text
from coda_inductor.select.roofline import product_us

ONE, OTHER = site(k=1024), site(n=4096, k=1024)
FAST, SLOW = figures({"128x128:2x1:pp": 50.0}), figures({"128x128:2x1:pp": 200.0})


def test_what_another_process_measures_is_found(tmp_path, monkeypatch):
    """A store a process: each looks again when the file changes, and only then."""
    here, there = Measurements(HOPPER, tmp_path), Measurements(HOPPER, tmp_path)
    assert here.find(ONE) is None
    there.add(keyed(ONE, FAST))
    assert here.find(ONE) == (FAST, "here")
    here.add(keyed(OTHER, SLOW))
    assert there.find(OTHER) == (SLOW, "here")
    assert there.find(ONE) == (FAST, "here")
    assert set(there.user_rows()) == {key_of(ONE), key_of(OTHER)}
    assert Measurements(HOPPER, tmp_path).user_rows() == there.user_rows()
    there.add(keyed(ONE, SLOW))  # again
    assert here.find(ONE) == (SLOW, "here")
    monkeypatch.setattr(kept, "sites_in", lambda _: pytest.fail("read again"))
    assert here.find(ONE) == there.find(ONE) == (SLOW, "here")


def test_another_model_gets_no_shipped_measurements(tmp_path):
    gpu = table(tmp_path / "tables", found=keyed(ONE, SLOW))
    assert Measurements(borrowing(gpu), tmp_path).find(ONE) is None
    mine = replace(borrowing(gpu), sites=table(tmp_path, "NVIDIA H901", keyed(ONE, FAST)).sites)
    assert Measurements(mine, tmp_path).find(ONE) == (FAST, "shipped")
    assert Measurements(B200, tmp_path).find(ONE) is None


M, N, K = 4096, 2048, 1024
PROGRAM = kinds()["dswiglu"]


def spelled(op: str = "neg"):
    first, *others = PROGRAM.stores
    steps = (*PROGRAM.steps, Step("more", op, (first.value,)))
    return replace(PROGRAM, steps=steps, stores=(replace(first, value="more"), *others))


def at(program=PROGRAM, **sizes):
    return replace(site("dswiglu", **({"m": M, "n": N, "k": K} | sizes)), program=program)


def like(us: float):
    return figures({"128x128:2x1:pp": us}, like=signature(PROGRAM))


def test_another_spelling_is_found_at_its_size_and_layout_alone(tmp_path):
    """Of several the slower counts."""
    store = Measurements(table(tmp_path / "tables", found=keyed(at(), like(40.0))), tmp_path)
    assert key_of(at(spelled())) != key_of(at())
    assert store.find(at(spelled())) == (like(40.0), "shipped")
    for other in (at(kinds()["act_bwd"]), at(n=2 * N), at(m=2 * M), replace(at(), b_major="k"),
                  replace(at(), copied=(512, 512))):  # fmt: skip
        assert store.find(other) is None
    for us in ((40.0, 44.0), (44.0, 40.0)):
        rows = keyed(at(), like(us[0])) | keyed(at(spelled()), like(us[1]))
        store = Measurements(table(tmp_path / str(us), found=rows), tmp_path)
        assert store.find(at(spelled("abs"))) == (like(44.0), "shipped")


def test_the_nearest_in_size_of_programs_that_are_alike(tmp_path):
    rows = keyed(at(), like(40.0)) | keyed(at(m=8 * M), like(300.0))
    rows |= keyed(at(kinds()["act_bwd"], n=N // 2), replace(like(1.0), like="other"))
    store = Measurements(table(tmp_path / "tables", found=rows), tmp_path)
    assert store.nearest(at(n=N // 2)) == (at(), like(40.0))
    assert store.nearest(at(spelled(), m=4 * M)) == (at(spelled(), m=8 * M), like(300.0))
    concatenated = replace(at(n=N // 2), copied=(512, 512))
    assert store.nearest(concatenated) == (replace(concatenated, n=N), like(40.0))
    for other in ({"b_major": "k"}, {"terms": 2}):
        assert store.nearest(replace(at(), **other)) is None
    assert store.nearest(site()) is None


def test_other_models_and_versions_have_another_file(tmp_path, monkeypatch):
    old = Measurements(HOPPER, tmp_path)
    old.add(keyed(ONE, FAST))
    for gpu in (B200, H100):
        assert Measurements(gpu, tmp_path).path != old.path
    for what, value in (("RENDERER_VERSION", "other"), ("label", lambda: "quack9")):
        with monkeypatch.context() as patch:
            patch.setattr(kept, what, value)
            new = Measurements(HOPPER, tmp_path)
            assert new.path != old.path
            assert new.find(ONE) is None


@pytest.mark.parametrize("text", [b"[]", b"\xff\xfe", b'{"format": 1, "sites": 3}'])
def test_a_damaged_file_is_one_warning(text, tmp_path, warned):
    path = Measurements(HOPPER, tmp_path).path
    path.write_bytes(text)
    store = Measurements(HOPPER, tmp_path)
    assert [store.find(ONE) for _ in range(3)] == [None] * 3
    assert store.gpu == HOPPER
    (said,) = warned()
    assert path.name in said
    store.add(keyed(ONE, FAST))  # it is replaced
    assert Measurements(HOPPER, tmp_path).find(ONE) == (FAST, "here")
    assert len(warned()) == 1


@pytest.mark.parametrize("row", ["null", '{"key": "k", "us": 3}', '{"key": "k", "us": {}}'])
def test_a_damaged_line_is_skipped(row, tmp_path, warned):
    """A file of another format, or none, is no warning either."""
    assert Measurements(HOPPER, tmp_path).find(ONE) is None
    text = as_text(HOPPER, keyed(ONE, FAST)).replace('"sites": [', f'"sites": [{row},')
    path = Measurements(HOPPER, tmp_path).path
    path.write_text(text)
    store = Measurements(HOPPER, tmp_path)
    assert store.find(ONE) == (FAST, "here")
    assert len(store.user_rows()) == 1
    assert not warned()
    path.write_text(text.replace('"format": 1', '"format": 99'))
    assert Measurements(HOPPER, tmp_path).find(ONE) is None


def test_what_is_left_is_noted_until_it_is_measured(tmp_path, warned):
    one, other, third = replace(site(), name="a"), site("swiglu", n=8192), site(m=512)
    store = Measurements(HOPPER, tmp_path)
    assert store.left() == []
    store.leave([one, other])
    store.leave([replace(one, name="b")])
    assert Measurements(HOPPER, tmp_path).left() == [replace(one, name="b"), other]
    store.add(keyed(other, figures({"x": 1.0})))
    assert store.left() == [replace(one, name="b")]
    store.leave([replace(third, k=64 * k) for k in range(1, 257)])
    assert len(store.left()) == 256
    store.path.with_suffix(".left").write_text("[{]")
    assert store.left() == []
    assert not warned()


def test_a_read_only_cache_is_looked_into(tmp_path, monkeypatch):
    """An image's: its measurements are found, and what this user measures counts more."""
    image, mine = tmp_path / "image", tmp_path / "mine"
    Measurements(HOPPER, image / kept.FOLDER).add(keyed(ONE, SLOW) | keyed(OTHER, SLOW))
    monkeypatch.setattr(cache_dir, "cache_dirs", lambda: (mine, image))
    store = Measurements(HOPPER)
    assert store.path.parent == mine / kept.FOLDER
    assert store.find(ONE) == (SLOW, "shipped")
    store.add(keyed(ONE, FAST))
    assert store.find(ONE) == (FAST, "here")
    assert store.find(OTHER) == (SLOW, "shipped")


def test_the_first_in_order_of_those_that_are_equal():
    """Within the spread, or within what two runs of one config differ by."""
    found = figures({"c": 100.0, "b": 101.9, "a": 102.1}, spread=0.02)
    assert found.best(["a", "b", "c"]) == "b"
    calm = figures({"c": 100.0, "b": 101.4, "a": 101.6})
    assert calm.best(["a", "b", "c"]) == "b"
    assert found.best(["unknown", "a", "c"]) == "c"
    assert found.best(["unknown"]) is None


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
    every = replace(site(m=5000, n=1024, k=512), a_major="m", terms=2, copied=(512, 512), groups=8,
                    rows=1250)  # fmt: skip
    assert key_of(every) == "6b42c26078914043 5120x1024x512 mk terms=2 copied=512+512 groups=8 of=4"


def test_what_ships_is_found_by_the_keys_of_programs():
    shipped = "".join(gpu.sites.read_text() for gpu in tables(None).values())
    missing = {name for name, program in kinds().items() if program.key not in shipped}
    assert missing == {"rotary"}  # spelled otherwise in what was measured


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, "fast", None])
def test_rubbish_is_no_time(value):
    row = to_row("key", figures({"128x128:2x1:pp": 10.5}))
    for wrong in ({"us": {"128x128:2x1:pp": value}}, {"unfused": value}, {"plain": value}):
        with pytest.raises((TypeError, ValueError)):
            from_row(row | wrong)


def test_products_of_what_was_measured_are_expected_to_take_about_as_long():
    errors = []
    for gpu in tables(None).values():
        for row in json.loads(gpu.sites.read_text())["sites"]:
            like, size = row["like"].split(), row["key"].split(" ")[1]
            if like[:2] == ["1", "bfloat16"] and "=" not in row["key"]:
                n, k = map(int, size.split("x")[1:])
                errors.append(product_us(row["m"], n, k, gpu) / row["plain"] - 1)
    errors.sort()
    assert len(errors) > 300
    assert abs(errors[len(errors) // 2]) < 0.05
    assert -0.25 < errors[len(errors) // 20] < errors[-len(errors) // 20] < 0.25
