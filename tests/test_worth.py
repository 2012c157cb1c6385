# SPDX-License-Identifier: Apache-2.0
"""``benchmarks worth``: what is written of measurements, with made-up ones."""

from benchmarks.worth_page import earns, gains, page

_WHOLE = {"ms": 10.0, "peak": 4.0, "host": 1.0, "kernels": 9}


def _without(ms: float, peak: float = 4.0) -> dict:
    return {"ms": ms, "ms_whole": 10.0, "peak": peak, "host": 2.0, "kernels": 12}


def test_a_feature_earns_its_lines_by_time_or_by_memory_on_one_workload():
    one = {"loss": _without(10.2), "norm": _without(10.05), "heads": _without(10.0, 4.2)}
    two = {"norm": _without(9.9), "packed": {"error": "RuntimeError: no"}}
    workloads = {"A": {"whole": _WHOLE, "without": one}, "B": {"whole": _WHOLE, "without": two}}
    found = {"environment": {"gpu": "G"}, "workloads": workloads}

    rows = gains(found)

    assert {name: earns(each) for name, each in rows.items()} == {
        "loss": True, "norm": False, "heads": True, "packed": False,
    }  # fmt: skip
    assert [row["workload"] for row in rows["norm"]] == ["A", "B"]
    text = page(found)
    assert text.index("`loss`") < text.index("`norm`") < text.index("`heads`")
    assert "RuntimeError: no" in text
    assert "+2.0% (A)" in text
