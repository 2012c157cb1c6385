# SPDX-License-Identifier: Apache-2.0
"""``benchmarks whole`` and ``adapters``: what is made of measurements, with made-up ones."""

import json

import pytest

from benchmarks import account, adapters, environment, headline, whole

_ABOUT = {"gpu": "G", "commit": "c", "versions": {"torch": "2"}}


def test_a_variant_is_parsed_or_refused():
    assert whole.parsed("bf16 coda") == ("bf16", "coda", 1, 8192, "")
    assert whole.parsed("rowwise compile 2x4096 adamw8") == (
        "rowwise", "compile", 2, 4096, "adamw8",
    )  # fmt: skip
    for wrong in ("bf16 inductor", "bf16 coda sgd", "bf16 coda adamw adamw8"):
        with pytest.raises(ValueError, match="is no variant such as"):
            whole.parsed(wrong)


def test_the_table_says_tokens_flops_and_what_did_not_run():
    samples = [{"ms": 990.0, "joules": 81.92}, {"ms": 1010.0, "joules": 81.92}]
    fits = {"parameters": 1e9, "peak": 60.0, "first_s": 9.0, "samples": samples}
    found = {
        "bf16 coda 2x4096": fits,
        "bf16 eager": {"error": "OutOfMemoryError: no", "samples": []},
    }
    text = whole.table({"environment": _ABOUT, "results": found})

    # 6 FLOP x 8192 tokens x (1e9 parameters + 32 layers x 4096 wide x 4096 tokens) in a second
    row = next(line for line in text.splitlines() if line.startswith("| bf16 coda 2x4096"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == ["1000", "8,192", "76", "7.6%", "60.0", "10.0", "9"]
    assert "bf16 eager did not run: OutOfMemoryError: no" in text


def test_the_page_is_of_the_committed_results():
    file = environment.REPOSITORY / "benchmarks" / "results" / "h200_whole.json"
    (block,) = whole.BLOCK.findall(whole.PAGE.read_text())
    assert block == whole.table(json.loads(file.read_text()))


def test_processes_take_turns_and_one_that_ended_is_left_out(monkeypatch):
    asked = []

    def ask(process):
        asked.append(process)
        return None if process == "c" else {"n": len(asked)}

    monkeypatch.setattr(headline, "ask", ask)
    found = headline.in_turn({name: name for name in "acb"}, samples=2)

    assert asked == list("acb" + "ab" + "ba")
    assert [sample["n"] for sample in found["a"]["samples"]] == [4, 7]
    assert found.keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "dims", "kind"),
    [
        ("nvjet_1", [[8192, 4096], [4096, 16]], "GEMMs of rank r"),
        ("nvjet_1", [[8192, 4096], [4096, 48]], "GEMMs of rank r"),
        ("kernel_cutlass_gemm", [[[8192, 16]], [[16, 4096]], []], "GEMMs of rank r"),
        ("nvjet_1", [[8192, 4096], [4096, 4096]], "GEMMs"),
        ("triton_poi_2", [[8192, 16]], "others of rank r"),
        ("triton_poi_2", [[8192, 48]], account.REST),
        ("triton_poi_2", [[1, 16, 8192, 64]], account.REST),
        ("flash_fwd", [[8192, 16]], "attention"),
    ],
)
def test_a_kernel_is_of_rank_r_by_the_matrices_of_its_launch(name, dims, kind):
    host = {"cat": "cpu_op", "args": {"External id": 1, "Input Dims": dims}}
    kernel = {"cat": "kernel", "name": name, "dur": 3.0 * account.CALLS, "args": {"External id": 1}}

    (found,) = adapters.kinds([host, kernel], 16)

    assert (found["kind"], found["us"], found["calls"]) == (kind, 3.0, 1 / account.CALLS)
