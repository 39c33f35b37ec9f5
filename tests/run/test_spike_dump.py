"""What is written down of a spike, and how `moba-train inspect-spike` shows it."""

import math
import shutil
from pathlib import Path

import pytest

from moba_train.config.load import load_config
from moba_train.data.loader import step_batches
from moba_train.data.samples import StageData
from moba_train.health.dump import Dump, dump_folder
from tests.resolved import stages_of
from tests.run.faults import POISONED, STEPS, inject, not_a_number, scaled_gradient, steady
from tests.run.tiny_run import VOCAB, Run


def test_the_dump_holds_the_batch_and_the_numbers_of_its_step(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    run, _ = skipping
    config = load_config(run.write_recipe())
    (stage,) = stages_of(config)
    data = StageData(stage.sources, stage.seq_len, STEPS * stage.batch_sequences, config.seed, {}, VOCAB)
    for step in (22, POISONED):
        found = run.dump(step)
        (rank,) = found["ranks"]
        batches = step_batches(data, (step - 1) * stage.batch_sequences, stage.batch_sequences, 2, 0, 1)
        parts = [[(p["source"], p["document"], p["start"], p["stop"]) for p in m] for m in rank["micro_batches"]]
        assert parts == [[tuple(part) for part in batch.parts] for batch in batches]
        assert rank["loss_tokens"] == sum(batch.loss_tokens for batch in batches)
        assert rank["loss"] == pytest.approx(found["loss"])
        losses = [(p["loss"], p["loss_tokens"]) for m in rank["micro_batches"] for p in m if p["loss_tokens"]]
        mean = sum(loss * tokens for loss, tokens in losses) / rank["loss_tokens"]
        assert rank["repeated_loss"] == pytest.approx(mean)
        assert mean == pytest.approx(found["loss"], rel=1e-3)
        norms = found["gradient_norms"]
        assert [layer["kind"] for layer in norms["layers"]] == ["moba", "full"]
        layers = [layer["norm"] for layer in norms["layers"]]
        others = [norms[key] for key in ("embedding", "norm", "output")]
        assert math.hypot(*layers, *others) == pytest.approx(found["grad_norm"], rel=1e-5)
        assert norms["kinds"] == pytest.approx({"moba": layers[0], "full": layers[1]})
        assert all(0 < layer["max_lse"] < 20 for layer in rank["attention"])
        assert rank["attention"] == found["attention"]


def test_a_fault_of_the_machine_is_told_from_one_of_the_data(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    """The dump repeats the batch with the step's weights: poisoned data fail again, a fault in the step does not."""
    run, _ = skipping
    (machine,), (data,) = run.dump(30)["ranks"], run.dump(POISONED)["ranks"]
    assert math.isnan(machine["loss"])
    assert machine["repeated_loss"] == pytest.approx(run.losses()[30], rel=0.1)
    assert data["repeated_loss"] == pytest.approx(data["loss"], rel=1e-5)
    assert data["repeated_loss"] > run.losses()[POISONED] + 1


def test_looking_at_a_step_does_not_change_the_training(
    run: Run, tmp_path: Path, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after a dump computes with the weights that the step before it made."""
    inject(monkeypatch, {18: scaled_gradient})
    assert steady(run, "log", 20).train_here() == 0
    assert run.dump(18)["action"] == "apply"
    unseen = steady(Run(tmp_path / "unseen", corpora), "log", 20)
    unseen.take_over(run, 16)
    shutil.rmtree(dump_folder(unseen.run_dir))
    monkeypatch.setattr("moba_train.run.recovery.write_dump", lambda *_arguments, **_named: Dump([], {}))
    assert unseen.train_here() == 0
    assert not dump_folder(unseen.run_dir).exists()
    assert unseen.losses() == run.losses()


def test_of_spikes_in_a_row_the_first_is_dumped_and_each_that_is_not_finite(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, {18: scaled_gradient, 19: scaled_gradient, 20: not_a_number})
    assert steady(run, "skip_step", 20).train_here() == 0
    assert [(spike["step"], "dump" in spike) for spike in run.records("spike")] == [(18, True), (19, False), (20, True)]


def test_a_dump_that_could_not_be_written_is_not_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moba_train.health.dump._write", lambda *_arguments: False)
    inject(monkeypatch, {2: not_a_number})
    assert steady(run, "skip_step", 10).train_here() == 0
    (event,) = run.records("spike")
    assert event["action"] == "skip"
    assert "dump" not in event
    assert "inspect-spike" not in event["message"]
