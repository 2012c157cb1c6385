# SPDX-License-Identifier: Apache-2.0
"""``examples/train.py`` trains, compares and draws; a bias or a divergence does not get past it.

One real run (eager and coda, float32, so that only the order of operations differs) serves the
tests of the run; the comparison is tested on results made by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import train  # noqa: E402
import train_report  # noqa: E402
import train_text  # noqa: E402

STEPS = 20
SMALLEST = train.Size(
    {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
     "num_attention_heads": 2, "num_key_value_heads": 1},
    length=32, batch=8, rate=1e-2,
)  # fmt: skip


def main(*arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["examples/train.py", *map(str, arguments)])
        patch.setitem(train.SIZES, "tiny", SMALLEST)
        train.main()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("train") / "results.json"
    options = f"--device cpu --no-autocast --seeds 0,1 --steps {STEPS} --backends eager,coda"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small only wait for their threads
    with torch._inductor.config.patch({"cpp.simdlen": 0}):  # scalar code builds faster
        main(*options.split(), "--out", out)
    torch.set_num_threads(threads)
    return out


@pytest.fixture
def results(path):
    return json.loads(path.read_text())


def test_coda_follows_eager_step_by_step(results):
    runs = train_report.grouped(results)
    for seed in (0, 1):
        eager, coda = (torch.tensor(runs[name][seed]["losses"]) for name in ("eager", "coda"))
        assert len(coda) == STEPS
        torch.testing.assert_close(coda, eager, rtol=0, atol=1e-3)
        assert coda[-5:].mean() < coda[0] - 1
        assert runs["coda"][seed]["eval_loss"] == pytest.approx(
            runs["eager"][seed]["eval_loss"], abs=1e-3
        )
    assert runs["eager"][0]["losses"][0] != runs["eager"][1]["losses"][0]


def test_training_and_evaluation_were_fused_and_compiled_once(results):
    runs = train_report.grouped(results)["coda"]
    assert runs[0]["fired_training"]["rms_norm"] == runs[0]["fired_training"]["rms_norm_backward"]
    assert runs[0]["fired_evaluation"]["swiglu"] == 1
    assert runs[1]["sites"] == runs[0]["sites"]  # the second seed compiled no further graph


def test_plot_and_page_hold_the_figures(results, path, tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        main("--plot", path, "--svg", folder / "training.svg", "--page", folder / "training.md")
    assert (tmp_path / "one/training.svg").read_text() == (
        tmp_path / "two/training.svg"
    ).read_text()
    page = (tmp_path / "one/training.md").read_text()
    assert "(training.svg)" in page
    evaluation = [run["eval_loss"] for run in results["runs"] if run["backend"] == "coda"]
    assert f"{sum(evaluation) / 2:.4f}" in page
    assert "Diverged: no run." in page
    assert str(path.parent) not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "eager,conda"], "unknown conda; known: eager, "),
        (["--plot", "results.json"], "needs --svg or --page"),
    ],
)
def test_wrong_arguments_name_the_remedy(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(*arguments)
    assert message in capsys.readouterr().err


def by_hand(**losses: list[float]) -> dict:
    """Results whose runs end at these losses, one a seed."""
    runs = [
        {"backend": name, "seed": seed, "losses": [5.0, 4.0, final, final], "eval_loss": final}
        for name, finals in losses.items()
        for seed, final in enumerate(finals)
    ]
    return {"runs": runs}


EAGER = [1.00, 1.02, 1.04]  # spread 0.02
REVERSED = [1.001, 1.019, 1.041]  # noise 0.001


@pytest.mark.parametrize(
    ("shift", "within_spread", "within_noise"),
    [(0.0019, True, True), (-0.0019, True, True), (0.0021, True, False), (-0.021, False, False)],
)
def test_a_bias_is_seen_at_twice_the_rounding_noise(shift, within_spread, within_noise):
    coda = [loss + shift for loss in EAGER]
    found = train_report.judge(by_hand(eager=EAGER, eager_reversed=REVERSED, coda=coda), "coda")
    assert found["evaluation"]["difference"] == pytest.approx(shift)
    assert found["evaluation"]["spread"] == pytest.approx(0.02)
    assert found["evaluation"]["noise"] == pytest.approx(0.001)
    assert found["evaluation"]["within_spread"] is within_spread
    assert found["evaluation"]["within_noise"] is within_noise


def test_differences_pair_equal_seeds():
    results = by_hand(eager=EAGER, coda=EAGER)
    results["runs"].reverse()
    results["runs"] = [run for run in results["runs"] if run != results["runs"][1]]
    assert train_report.differences(train_report.grouped(results), "coda", "evaluation") == [0, 0]


@pytest.mark.parametrize(
    ("final", "why"),
    [(float("nan"), "not finite"), (float("inf"), "not finite"), (5.5, "above the first")],
)
def test_divergence_is_named(final, why):
    assert why in train_report.diverged(by_hand(coda=[final])["runs"][0])
    assert train_report.diverged(by_hand(coda=[4.5])["runs"][0]) == ""


def test_every_row_is_trained_on_or_held_out_and_a_seed_decides_the_order():
    text, description = train_text.corpus()
    assert description["bytes"] == len(text) > 2**20
    training, held_out = rows = train_text.cut(text, 1024)
    assert len(training) + len(held_out) == len(text) // 1024
    assert not {bytes(row.tolist()) for row in held_out[:50]} & {
        bytes(row.tolist()) for row in training
    }
    batches = train_text.Batches(rows, 16, "cpu")
    first, again, other = (torch.stack(list(batches.train(seed, 3))) for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)
    backwards = train_text.Batches(rows, 16, "cpu", reverse=True)
    assert next(backwards.train(0, 3)).equal(first[0].flip(0))


def test_epochs_follow_one_another_and_no_batch_is_short():
    rows = (torch.arange(10, dtype=torch.uint8).view(10, 1), torch.zeros(3, 1, dtype=torch.uint8))
    drawn = list(train_text.Batches(rows, 4, "cpu").train(0, 7))
    assert [len(batch) for batch in drawn] == [4] * 7
    assert torch.cat(drawn)[:10].sort(0).values.flatten().tolist() == list(range(10))


def test_learning_rate_warms_up_then_falls_to_its_floor():
    recipe = train.Recipe(size="tiny", device="cpu", params="fp32", autocast=False, steps=100)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(recipe.floor, abs=1e-3)
