"""Stages as a user sees them: an exit criterion prolongs a stage, boundaries show, a stopped run does the same."""

import math
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.load import load_config
from moba_train.config.schema import UntilConfig
from moba_train.optim.spec import stage_learning_rate
from moba_train.run.evaluations import Verdict, judge
from tests.resolved import stages_of
from tests.run.tiny_run import VOCAB, Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks

STEP = 512  # tokens


def prolonged(folder: Path, corpora: Path) -> Run:
    """Full attention, MoBA for 3 to 9 steps, and full attention again; the criterion is judged at steps 6, 8 and 10."""
    run = Run(folder, corpora)
    run.recipe |= {
        "evaluation": {"every": 100, "sequences": 2, "position_wise": {"bucket": 32, "sequences": 3, "every": 2}},
        "checkpoint": {"every": 100},
        "stages": [
            {"name": "short", "seq_len": 64, "tokens": 3 * STEP, "attention": {"default": "full"}},
            {
                "name": "activate",
                "seq_len": 128,
                "tokens": 3 * STEP,
                "rope": {"kind": "yarn", "factor": 2, "original_seq_len": 64},
                "until": {"trailing_loss_recovered": {"tolerance": 0.01}, "max_tokens": 9 * STEP},
            },
            {"name": "full", "seq_len": 128, "tokens": 4 * STEP, "attention": {"default": "full"}},
        ],
    }
    return run


def history(run: Run) -> list[dict[str, Any]]:
    """All that is logged of steps and evaluations, but for times and memory."""
    types = ("metrics", "validation_loss", "position_wise", "stage_exit", "boundary")
    times = {"time", "step_s", "data_s", "tokens_per_s", "tokens_per_s_per_device", "attention_s"}
    times |= {"mfu", "mfu_dense", "memory_gib", "reserved_gib", "allocator_retries"}
    records = [record for record_type in types for record in run.records(record_type)]
    return [{key: value for key, value in record.items() if key not in times} for record in records]


@pytest.fixture(scope="module")
def met_at_8() -> Iterator[None]:
    """The criterion's words, but it is met at the second evaluation of its stage, whatever this tiny model's losses."""

    def verdict(until: UntilConfig, numbers: Mapping[str, float], before: float | None) -> Verdict:
        own = numbers["trailing_loss"]
        seen.setdefault(own, len(seen) + 1)  # a resumed run evaluates what was evaluated before
        return Verdict(seen[own] == 2, judge(until, numbers, before).message)

    seen: dict[float, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moba_train.run.evaluations.judge", verdict)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpora: Path, met_at_8: None) -> Run:
    run = prolonged(tmp_path_factory.mktemp("prolonged"), corpora)
    run.recipe["telemetry"]["report"] = True
    assert run.train_here() == 0
    return run


def test_an_exit_criterion_prolongs_its_stage_and_the_next_one_follows(undisturbed: Run) -> None:
    stages = [record["stage"] for record in undisturbed.records()]
    assert stages == ["short"] * 3 + ["activate"] * 5 + ["full"] * 4
    assert [record["step"] for record in undisturbed.records("stage_exit")] == [6, 8]
    assert [record["last_step"] for record in undisturbed.records("stage")] == [16, 16, 12]
    assert [record["tokens"] for record in undisturbed.records()] == [STEP * step for step in range(1, 13)]


def test_every_evaluation_runs_at_the_end_of_a_stage_though_a_criterion_ends_it(undisturbed: Run) -> None:
    """`validation_loss` is due after 100 steps, and where a stage's tokens end: at step 6 of `activate`, not at 8."""
    assert [record["step"] for record in undisturbed.records("validation_loss")] == [3, 6, 8, 12]


def test_the_schedule_stands_still_while_the_criterion_is_not_met(undisturbed: Run) -> None:
    """Rates are those of the same run without `until`, with the rate at the end of the stage's tokens repeated."""
    rates = [record["lr"] for record in undisturbed.records()]
    undisturbed.recipe["stages"][1].pop("until")
    config = load_config(undisturbed.write_recipe())
    stages, schedule = stages_of(config), config.optim.schedule
    wanted = [
        stage_learning_rate(stages, stage.index, schedule, step * STEP)
        for stage in stages
        for step in range(stage.first_step + 1, stage.end_step + 1)
    ]
    assert rates == [*wanted[:6], wanted[5], wanted[5], *wanted[6:]]
    assert rates[-1] < rates[5]


def test_a_stage_that_never_recovers_ends_the_run_at_its_max_tokens(
    tmp_path: Path, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains on noise, so that the loss on text rises; that is judged at steps 4, 5 and 6, and never met."""
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "noise", np.uint16) as noise:
        for _ in range(20):
            noise.add_document(rng.integers(VOCAB, size=300))
    run = Run(tmp_path, corpora)
    recovered = {"tolerance": 0.002, "reference": "before"}
    run.recipe |= {
        "attention": {"moba": {"block_size": 16, "topk": 2}},
        "evaluation": {"every": 1, "sequences": 2, "position_wise": {"bucket": 32, "sequences": 3}},
        "checkpoint": {"every": None},
        "stages": [
            {"name": "text", "seq_len": 128, "tokens": 3 * STEP, "attention": {"default": "full"}},
            {
                "name": "noise",
                "seq_len": 128,
                "tokens": STEP,
                "until": {"trailing_loss_recovered": recovered, "max_tokens": 3 * STEP},
                "train": [{"path": str(tmp_path / "noise")}],
                "lr": 0.1,
                "schedule": {"kind": "constant"},
            },
        ],
        "telemetry": {"console": True, "wandb": {"mode": "disabled"}},
    }
    assert run.train_here() == 0
    verdicts = run.records("stage_exit")
    before, *judged = [record["trailing_loss"] for record in run.records("position_wise")[2:]]
    assert [(record["stage"], record["step"]) for record in verdicts] == [("noise", step) for step in (4, 5, 6)]
    for verdict, loss in zip(verdicts, judged, strict=True):
        words = (
            f"criterion not met: trailing loss {loss:.4f}, {before:.4f} at the end of the stage before, tolerance 0.002"
        )
        assert loss > before + 0.002
        assert verdict["message"].startswith(words)
    at_the_end = "; the stage ends all the same, at its max_tokens"
    assert [verdict["message"].endswith(at_the_end) for verdict in verdicts] == [False, False, True]
    assert run.records()[-1]["tokens"] == 6 * STEP
    assert "ends all the same" in " ".join(capsys.readouterr().out.split())


def test_stops_around_the_stage_exit_change_nothing(tmp_path: Path, corpora: Path, undisturbed: Run) -> None:
    """Bitwise: where it was judged, and in the next stage before its boundary is compared."""
    run = prolonged(tmp_path, corpora)
    for step in (6, 9):
        assert run.train_here("--stop-at-step", str(step)) == 0
    assert run.train_here() == 0
    assert history(run) == history(undisturbed)
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)


def test_boundaries_show_in_every_log(undisturbed: Run) -> None:
    losses = undisturbed.losses()
    first, second = undisturbed.records("boundary")
    assert (first["stage"], first["loss_before"]) == ("activate", pytest.approx(sum(losses[:3]) / 3))
    assert second["loss_before"] == pytest.approx(sum(losses[3:8]) / 5)
    assert second["loss_step"] == pytest.approx(sum(losses[8:]) / 4 - sum(losses[3:8]) / 5)
    assert [record["stage_index"] for record in undisturbed.records("stage")] == [0, 1, 2]


def test_a_boundary_is_reported_once_whenever_the_run_is_stopped_or_made_longer(run: Run) -> None:
    """The checkpoint of a stage's last step comes before the comparison, which the run then makes at the same step."""
    stage = {"seq_len": 64, "attention": {"default": "full"}}
    run.recipe["stages"] = [{"name": name, "tokens": 4 * STEP, **stage} for name in ("one", "two", "three")]
    assert run.train_here("--stop-at-step", "8") == 0
    first = run.records("boundary")
    assert [(event["stage"], event["step"]) for event in first] == [("two", 8)]
    assert run.train_here() == 0
    whole = run.records("boundary")
    assert whole[:1] == first
    assert [(event["stage"], event["step"]) for event in whole[1:]] == [("three", 12)]
    assert run.train_here() == 0, "nothing is left to do"
    run.recipe["stages"][2]["tokens"] = 20 * STEP
    assert run.train_here() == 0
    assert run.records()[-1]["step"] == 28
    assert run.records("boundary") == whole


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_the_beginning_of_a_stage_is_recorded_once(run: Run, killed: bool) -> None:
    """A run that is stopped at a boundary has saved in the stage that begins there; one that is killed later resumes
    from the checkpoint of the boundary, saved in the stage before."""
    stage = {"seq_len": 64, "attention": {"default": "full"}}
    run.recipe["stages"] = [{"name": name, "tokens": 4 * STEP, **stage} for name in ("one", "two")]
    run.recipe["checkpoint"]["every"] = 4 if killed else 3
    assert run.train_here("--stop-at-step", "5" if killed else "4") == 0
    if killed:
        shutil.rmtree(run.run_dir / "checkpoints" / "step_00000005")
    begun = run.records("stage")
    assert [(event["stage"], event["step"]) for event in begun] == [("one", 0), ("two", 4)]
    assert run.train_here() == 0
    assert run.records("stage") == begun
    (resumed,) = run.records("resume")
    assert (resumed["stage"], resumed["last_step"]) == ("one" if killed else "two", 8)
    assert f"step 4, {'at the end of stage one' if killed else 'in stage two'}: " in resumed["message"]


def test_loss_by_position_is_logged_for_every_stage(undisturbed: Run) -> None:
    events = undisturbed.records("position_wise")
    assert [event["step"] for event in events] == [2, 3, 4, 6, 8, 10, 12]
    for event in events:
        whole = event["position_wise"]
        assert whole["bucket"] == 32
        assert whole["sequences"] == 3
        own = whole["curves"][whole["attention"]]
        assert len(own["mean"]) == (2 if event["stage"] == "short" else 4)
        assert event["trailing_loss"] == own["mean"][-1]
        assert set(whole["curves"]) == ({"moba", "full"} if event["stage"] == "activate" else {"full"})
        assert all(math.isfinite(value) for value in own["mean"] + own["standard_error"])
    assert events[3]["trailing_gap"] == pytest.approx(events[3]["trailing_loss"] - events[3]["trailing_loss_full"])


def test_a_stage_exits_alike_on_ranks_that_share_batches_and_sequences(
    tmp_path: Path, corpora: Path, ranks: Ranks
) -> None:
    """On one rank, and on two: first each with sequences of its own, then with halves of the same; and in `eval`."""
    alone, shared = prolonged(tmp_path / "alone", corpora), prolonged(tmp_path / "shared", corpora)
    for run, count in ((alone, 1), (shared, 2)):
        run.folder.mkdir()
        run.recipe["stages"][1]["until"]["trailing_loss_recovered"]["tolerance"] = 10.0
        run.recipe["stages"][1]["parallel"] = {"cp": count}
        run.recipe["stages"][2]["tokens"] = STEP
        ranks.train(run, count)
    assert [record["step"] for record in shared.records("stage_exit")] == [6]
    assert shared.losses() == pytest.approx(alone.losses(), rel=1e-4)
    for got, want in zip(shared.records("position_wise"), alone.records("position_wise"), strict=True):
        assert got["step"] == want["step"]
        for name, curve in want["position_wise"]["curves"].items():
            assert got["position_wise"]["curves"][name]["mean"] == pytest.approx(curve["mean"], rel=1e-4)
            assert got["position_wise"]["curves"][name]["standard_error"] == pytest.approx(
                curve["standard_error"], rel=1e-2
            )


def test_every_stage_runs_compiled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many were compiled before: torch compiles the same code only so often, then it gives up and warns."""
    run.recipe |= {
        "compile": True,
        "evaluation": {"every": 100, "sequences": 2, "position_wise": {"bucket": 16, "sequences": 2}},
        "stages": [
            {"name": f"of-{length}", "seq_len": length, "tokens": STEP, "micro_batch_size": STEP // 2 // length}
            for length in (64, 128)
        ],
    }
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        assert run.train_here() == 0
    assert [record["stage"] for record in run.records()] == ["of-64", "of-128"]
