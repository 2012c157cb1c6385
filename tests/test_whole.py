# SPDX-License-Identifier: Apache-2.0
"""``benchmarks whole`` and ``adapters``: what is made of measurements, with made-up ones."""

import json

import pytest

from benchmarks import account, adapters, environment, whole


def test_a_variant_is_parsed_or_refused():
    assert whole.parsed("bf16 coda") == ("bf16", "coda", 1, 8192, "")
    assert whole.parsed("rowwise compile 2x4096 adamw8") == (
        "rowwise", "compile", 2, 4096, "adamw8",
    )  # fmt: skip
    for wrong in ("bf16 inductor", "bf16 coda sgd", "bf16 coda adamw adamw8"):
        with pytest.raises(ValueError, match="is no variant such as"):
            whole.parsed(wrong)


def test_the_page_is_of_the_committed_results():
    file = environment.REPOSITORY / "benchmarks" / "results" / "h200_whole.json"
    (block,) = whole.BLOCK.findall(whole.PAGE.read_text())
    assert block == whole.table(json.loads(file.read_text()))


@pytest.mark.parametrize(
    ("name", "dims", "kind"),
    [
        ("nvjet_1", [[8192, 4096], [4096, 48]], "GEMMs of rank r"),
        ("kernel_cutlass_gemm", [[[8192, 16]], [[16, 4096]], []], "GEMMs of rank r"),
        ("nvjet_1", [[8192, 4096], [4096, 4096]], "GEMMs"),
        ("triton_poi_2", [[8192, 16]], "others of rank r"),
        ("triton_poi_2", [[1, 16, 8192, 64]], account.REST),
        ("flash_fwd", [[8192, 16]], "attention"),
    ],
)
def test_a_kernel_is_of_rank_r_by_the_matrices_of_its_launch(name, dims, kind):
    host = {"cat": "cpu_op", "args": {"External id": 1, "Input Dims": dims}}
    kernel = {"cat": "kernel", "name": name, "dur": 3.0 * account.CALLS, "args": {"External id": 1}}

    (found,) = adapters.kinds([host, kernel], 16)

    assert (found["kind"], found["us"], found["calls"]) == (kind, 3.0, 1 / account.CALLS)
