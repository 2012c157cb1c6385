# SPDX-License-Identifier: Apache-2.0
"""``examples/train.py`` trains under eager and coda, float32 so that only the order differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import train  # noqa: E402

STEPS = 12


def main(*arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["examples/train.py", *map(str, arguments)])
        patch.setitem(train.SIZES, "tiny", ((32, 64, 1, 2, 1), (8, 32), 1e-2))
        train.main()


def test_coda_follows_eager_step_by_step(tmp_path, capsys):
    out = tmp_path / "runs.json"
    with torch._inductor.config.patch({"cpp.simdlen": 0}):  # scalar code builds faster
        main(
            *f"--device cpu --no-autocast --steps {STEPS} --backends eager,coda --out {out}".split()
        )
    eager, coda = json.loads(out.read_text())
    ours = torch.tensor(coda["losses"])
    assert len(ours) == STEPS
    torch.testing.assert_close(ours, torch.tensor(eager["losses"]), rtol=0, atol=1e-3)
    assert ours[-3:].mean() < ours[0] - 0.3
    assert coda["eval_loss"] == pytest.approx(eager["eval_loss"], abs=1e-3)
    assert "coda            from eager: training loss 0.00" in capsys.readouterr().out


def test_differences_pair_equal_seeds():
    runs = [{"backend": name, "seed": seed, "eval_loss": loss + off}
            for name, off in (("coda", 0.5), ("eager", 0.0))
            for seed, loss in enumerate((1.0, 2.0))]  # fmt: skip
    found = train.differences(runs, lambda run: run["eval_loss"])
    assert found == {"coda": 0.5, "eager": 0.0}


def test_rows_are_held_out_and_epochs_follow_one_another():
    training, held_out = train.rows_of_text(1024)
    assert len(training) > 14 * len(held_out) > 0
    rows = torch.arange(10, dtype=torch.uint8).view(10, 1)
    drawn = list(train.batches(rows, 4, 0, 7))
    assert [len(batch) for batch in drawn] == [4] * 7
    assert torch.cat(drawn)[:10].sort(0).values.flatten().tolist() == list(range(10))
