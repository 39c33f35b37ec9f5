"""Faults in the middle of training: every one is seen, what the recipe says happens, and the weights stay sound."""

import json
import math
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import Accept
from moba_train.checkpoint.writer import ShardWriter
from moba_train.config.load import load_config
from moba_train.config.stages import Stage, timed
from moba_train.errors import CheckpointError, TrainingError
from moba_train.optim.spec import stage_learning_rate
from moba_train.resolve.run import resolve_unchecked
from moba_train.run import recovery as recovery_module
from moba_train.run.checkpoints import Loaded
from moba_train.run.progress import Progress
from moba_train.run.recovery import Recovery
from moba_train.run.restarts import RESTARTS
from moba_train.train import main
from tests.noting import noting
from tests.resolved import stages_of
from tests.run.faults import (
    FAULTS,
    POISONED,
    STEPS,
    inject,
    not_a_number,
    not_a_number_on_rank_1,
    overflow,
    scaled_gradient,
    steady,
)
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks


def test_every_fault_is_seen_and_changes_nothing(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    run, changed = skipping
    faulty = [*FAULTS, POISONED]
    assert [(spike["step"], spike["action"]) for spike in run.records("spike")] == [(step, "skip") for step in faulty]
    assert [step for step, touched in changed if not touched] == faulty
    assert read_meta(run.newest_checkpoint)["progress"]["skipped"] == faulty


def test_skipped_tokens_count_as_consumed_and_the_schedule_goes_on(
    skipping: tuple[Run, list[tuple[int, bool]]],
) -> None:
    run, _ = skipping
    config = load_config(run.write_recipe())
    (stage,) = stages_of(config)
    records = run.records()
    assert [(record["step"], record["tokens"]) for record in records] == [(s, 512 * s) for s in range(1, STEPS + 1)]
    for record in records:
        expected = stage_learning_rate([stage], 0, config.optim.schedule, record["tokens"])
        assert record["lr"] == pytest.approx(expected)


def test_that_a_checkpoint_is_used_again_is_said(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    run, _ = skipping
    said = [record["message"] for record in run.records("warning")]
    passed_over, again = (
        [match[1] for text in said if (match := re.match(rf"the checkpoint of step (\d+) is {how}", text))]
        for how in ("passed over from now on", "used again")
    )
    assert passed_over == again != []


def rolling_back(run: Run) -> Run:
    """It skips step 22 and goes back at step 26."""
    steady(run, "rollback", 30).recipe["checkpoint"]["keep_last"] = 20
    return run


def train_rolling_back(run: Run, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, {22: scaled_gradient, 26: overflow})
        assert run.train_here(*arguments) == 0


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    run = rolling_back(Run(tmp_path_factory.mktemp("rollback"), corpora))
    train_rolling_back(run)
    return run


def test_a_rollback_returns_to_the_last_checkpoint_from_before_the_spike(rolled_back: Run) -> None:
    """That of step 20: the one of step 24 was saved two steps after a flagged one."""
    (event,) = rolled_back.records("rollback")
    assert (event["step"], event["step_from"], event["step_to"]) == (26, 26, 20)
    assert f"{6 * 512} tokens" in event["message"]
    folder = rolled_back.run_dir / "checkpoints"
    assert_same_tensors(folder / "step_00000026", folder / "step_00000020")
    assert [read_meta(folder / f"step_{step:08d}")["good"] for step in (20, 24, 26)] == [True, False, True]
    progress = read_meta(rolled_back.newest_checkpoint)["progress"]
    assert (progress["skipped"], progress["rollbacks"]) == ([], [[26, 20]])
    assert rolled_back.losses()[-1] < rolled_back.losses()[19]


def test_resuming_before_and_after_a_rollback_is_bitwise_equal(rolled_back: Run, run: Run) -> None:
    """After a kill before the skipped step, and after stops before and at the rollback."""
    resumed = rolling_back(run)
    resumed.take_over(rolled_back, 20)
    for arguments in (["--stop-at-step", "24"], ["--stop-at-step", "26"], []):
        train_rolling_back(resumed, *arguments)
    assert [event["step"] for event in resumed.records("resume")] == [20, 24, 26]
    assert [record["step"] for record in resumed.records()] == list(range(1, 31))
    assert [json.dumps(loss) for loss in resumed.losses()] == [json.dumps(loss) for loss in rolled_back.losses()]
    ours, theirs = resumed.newest_checkpoint, rolled_back.newest_checkpoint
    assert read_meta(ours)["progress"]["rollbacks"] == read_meta(theirs)["progress"]["rollbacks"]
    assert_same_tensors(ours, theirs)


@pytest.mark.parametrize(
    ("spike", "back_to", "compared"),
    [(20, 16, 18), (10, 8, 19), (16, 12, 20)],
    ids=["behind", "before", "undoing losses, so that there are only eight at the end"],
)
def test_a_boundary_is_compared_once_wherever_a_rollback_goes(
    run: Run, monkeypatch: pytest.MonkeyPatch, spike: int, back_to: int, compared: int
) -> None:
    """Stage next begins at step 8 and is compared when ten steps of it were applied, with losses of its own alone."""
    steady(run, "rollback", 8)
    run.recipe["stages"].append(run.recipe["stages"][0] | {"name": "next", "tokens": 12 * 512})
    inject(monkeypatch, {spike: overflow})
    assert run.train_here() == 0
    assert [(event["step"], event["step_to"]) for event in run.records("rollback")] == [(spike, back_to)]
    assert [event["step"] for event in run.records("boundary")] == [compared]


def test_a_wrong_byte_in_an_old_meta_costs_that_checkpoint_only(rolled_back: Run, run: Run) -> None:
    """In step 20, which the rollback would take, and in step 4, which only retention meets, at every save."""
    rolling_back(run)
    run.take_over(rolled_back, 24)
    folder = run.run_dir / "checkpoints"
    for step in (4, 20):
        meta = folder / f"step_{step:08d}" / "meta.json"
        meta.write_bytes(meta.read_bytes().replace(b'"progress"', b'"progresS"'))
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, {26: overflow})
        assert run.train_here() == 0
    (event,) = run.records("rollback")
    assert (event["step_from"], event["step_to"]) == (26, 16)
    assert (folder / "set-aside-step_00000020").is_dir()
    assert not run.records("warning"), "no save is reported as failed"


@pytest.mark.parametrize(
    ("spike", "named"),
    [
        ({"reaction": "log"}, "health.spike.reaction"),
        ({"reaction": "skip_step", "max_skips": 1}, "health.spike.max_skips"),
        ({"reaction": "rollback"}, "checkpoint.every"),
    ],
)
def test_where_the_reaction_ends_the_run_says_so(
    run: Run,
    spike: dict[str, Any],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two steps that are not finite, before the first checkpoint."""
    changed = inject(monkeypatch, dict.fromkeys((2, 3), not_a_number))
    assert steady(run, **spike).train_here() == 65
    assert named in capsys.readouterr().err
    assert [touched for _, touched in changed[1:]] == [False] * (len(changed) - 1)


def test_finite_spikes_that_outlast_the_skips_do_not_end_the_run_as_a_fault_of_the_data(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inject(monkeypatch, dict.fromkeys((18, 19), scaled_gradient))
    assert steady(run, "skip_step", 20, max_skips=1).train_here() == TrainingError.exit_code != 65
    assert "health.spike.max_skips" in capsys.readouterr().err
    (start,) = json.loads((run.run_dir / RESTARTS).read_text())["starts"]
    assert not start["fatal"]


def test_the_end_names_the_stage_s_own_keys_and_the_checkpoint_from_before_the_spike(
    rolled_back: Run, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of step 32 comes two steps after a flagged one; it is what the same command would go on from. It
    is still being written when the run ends."""
    write = ShardWriter.write

    def write_slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return write(*arguments)

    monkeypatch.setattr(ShardWriter, "write", write_slowly)
    rolling_back(run)
    run.recipe["health"]["spike"]["max_rollbacks"] = 1
    run.recipe["stages"][0] |= {"tokens": 40 * 512, "lr": 0.002, "schedule": {"kind": "constant", "warmup_tokens": 600}}
    run.take_over(rolled_back, 28)
    inject(monkeypatch, {30: scaled_gradient, 34: overflow})
    assert run.train_here() == 65
    said = capsys.readouterr().err
    assert "the last checkpoint is step 32" in said
    assert f"move those newer than step 28 out of {run.run_dir / 'checkpoints'}" in said
    assert "a lower stages[0].lr (0.002 now), a longer stages[0].schedule.warmup_tokens (600 now)" in said


def test_the_end_names_no_checkpoint_to_move_away_where_the_newest_is_passed_over_anyway(
    rolled_back: Run, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step right after the checkpoint of step 32 is not finite, so that the same command goes on from step 28."""
    rolling_back(run)
    run.recipe["health"]["spike"]["max_rollbacks"] = 1
    run.recipe["stages"][0]["tokens"] = 40 * 512
    run.take_over(rolled_back, 28)
    inject(monkeypatch, {30: scaled_gradient, 33: overflow})
    assert run.train_here() == 65
    said = capsys.readouterr().err
    assert "the checkpoint of step 32 is passed over from now on, and older ones are used" in said
    assert "move those newer" not in said


def train_with_a_fault_on_rank_1(recipe: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, {4: not_a_number_on_rank_1})
        return main([recipe])


@pytest.mark.parametrize("parallel", [{"cp": 2}, {"tp": 2}], ids=["cp", "tp"])
def test_what_one_rank_alone_sees_all_ranks_act_upon(run: Run, ranks: Ranks, parallel: dict[str, int]) -> None:
    """Two ranks that share every sequence, or every layer."""
    steady(run, "rollback", 6)
    run.recipe["parallel"] = parallel
    run.recipe["optim"]["schedule"] = {}
    run.recipe["checkpoint"] = {"every": 2, "keep_last": 10}
    ranks.work(train_with_a_fault_on_rank_1, [str(run.write_recipe())], 2)

    assert [(event["step_from"], event["step_to"]) for event in run.records("rollback")] == [(4, 2)]
    folder = run.run_dir / "checkpoints"
    assert_same_tensors(folder / "step_00000004", folder / "step_00000002")
    seen = run.dump(4)["ranks"]
    assert [math.isnan(rank["loss"]) for rank in seen] == [False, True]
    assert seen[0]["attention"][0] != seen[1]["attention"][0]
    assert sum(rank["loss_tokens"] for rank in seen) == run.records()[3]["loss_tokens"]
    for rank in seen:
        assert all(math.isfinite(value) for value in rank["attention"][0].values())
        losses = [(p["loss"], p["loss_tokens"]) for m in rank["micro_batches"] for p in m if p["loss_tokens"]]
        assert sum(tokens for _, tokens in losses) == rank["loss_tokens"]
        mean = sum(loss * tokens for loss, tokens in losses) / rank["loss_tokens"]
        assert rank["repeated_loss"] == pytest.approx(mean)
    assert run.records()[-1]["step"] == 6
    assert math.isfinite(run.losses()[-1])


def test_a_pipeline_acts_on_a_spike_and_dumps_every_layer(run: Run, ranks: Ranks) -> None:
    """The loss is known on the last rank alone, and each rank has seen the attention of its own layer."""
    steady(run, "rollback", 6)
    run.recipe["parallel"] = {"pp": 2}
    run.recipe["optim"]["schedule"] = {}
    run.recipe["checkpoint"] = {"every": 2, "keep_last": 10}
    ranks.work(train_with_a_fault_on_rank_1, [str(run.write_recipe())], 2)

    assert [(event["step_from"], event["step_to"]) for event in run.records("rollback")] == [(4, 2)]
    folder = run.run_dir / "checkpoints"
    assert_same_tensors(folder / "step_00000004", folder / "step_00000002")
    seen = run.dump(4)
    first, last = seen["ranks"]
    assert first["loss"] is None
    assert math.isnan(last["loss"])
    assert (first["loss_tokens"], last["loss_tokens"]) == (0, run.records()[3]["loss_tokens"])
    of_documents = [sum(p["loss_tokens"] for m in rank["micro_batches"] for p in m) for rank in (first, last)]
    assert of_documents == [0, last["loss_tokens"]]
    assert [bool(layer) for layer in first["attention"] + last["attention"]] == [True, False, False, True]
    assert seen["attention"] == [first["attention"][0], last["attention"][1]]
    assert last["repeated_loss"] == pytest.approx(run.losses()[2], rel=0.2)
    assert len(seen["gradient_norms"]["layers"]) == 2
    assert run.records()[-1]["step"] == 6
    assert math.isfinite(run.losses()[-1])


def go_back(newest: Callable[[Accept], Path]) -> None:
    """Go back at step 69 to what `newest` gives. Step 17 was skipped, and steps 31 to 39 were undone."""
    recovery = Recovery(
        SimpleNamespace(checkpoint=SimpleNamespace(every=4)),  # type: ignore[arg-type]
        **dict.fromkeys(("model", "optimizer", "detector", "telemetry")),  # type: ignore[arg-type]
        checkpoints=SimpleNamespace(newest=newest),  # type: ignore[arg-type]
        progress=Progress(step=69, skipped=[17], rollbacks=[[40, 30]]),
    )
    stage = SimpleNamespace(name="only", tokens_after=lambda step: 512 * step)
    recovery._roll_back(stage, TrainingError)  # type: ignore[arg-type]


def test_a_rollback_takes_neither_steps_right_before_a_spike_nor_undone_ones() -> None:
    asked: list[Accept] = []

    def none(accept: Accept) -> Path:
        asked.append(accept)
        raise CheckpointError("none is left")

    with pytest.raises(TrainingError, match="there is no checkpoint from before the spike"):
        go_back(none)
    (accept,) = asked
    taken = [step for step in range(1, 70) if accept({"good": True, "progress": {"step": step}})]
    assert taken == [*range(1, 16), *range(17, 31), *range(40, 68)]


def test_a_checkpoint_that_cannot_be_read_this_time_is_no_reason_to_lower_checkpoint_every() -> None:
    def unreadable(_accept: Accept) -> Path:
        raise UnreadableError("step_00000064/meta.json could not be read")

    with pytest.raises(UnreadableError, match=r"^step_00000064/meta\.json could not be read$"):
        go_back(unreadable)


def test_a_rollback_over_the_begin_of_a_stage_counts_the_tokens_of_both(run: Run) -> None:
    """Step 5, of 1024 tokens, is the last of its stage; 6 and 7 have 2048. The first stage has ended after step 3."""
    until = {"metric": "eval_loss", "at_most": 100, "max_tokens": 9 * 512}
    run.recipe["stages"] = [
        {"name": "first", "seq_len": 64, "tokens": 3 * 512, "until": until},
        {"name": "next", "seq_len": 64, "tokens": 2 * 1024, "batch_tokens": 1024},
        {"name": "last", "seq_len": 64, "tokens": 4 * 2048, "batch_tokens": 2048},
    ]
    config = load_config(run.write_recipe())
    progress = Progress(step=7, stage=2, exited_steps={"first": 3})
    said: list[str] = []
    recovery = Recovery(
        resolve_unchecked(config),
        model=None,  # type: ignore[arg-type]
        optimizer=SimpleNamespace(zero_grad=lambda: None),  # type: ignore[arg-type]
        detector=SimpleNamespace(load_state_dict=lambda _: None, rebaseline=lambda: None),  # type: ignore[arg-type]
        checkpoints=SimpleNamespace(  # type: ignore[arg-type]
            newest=lambda _accept: Path("step_00000004"), load=lambda _path: Loaded(Progress(step=4, stage=1), "")
        ),
        progress=progress,
        telemetry=SimpleNamespace(event=lambda *values, **_: said.append(values[-1])),  # type: ignore[arg-type]
    )
    recovery._roll_back(timed(stages_of(config), progress.exited_steps)[2], TrainingError)
    (text,) = said
    assert f"the 3 steps since then are undone, and the {1024 + 2 * 2048} tokens of their batches" in text


def test_a_flagged_step_that_a_rollback_undid_is_forgotten_in_the_next_stage_too(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 7 is the first of its stage and goes back to step 4 of the stage before."""
    steady(run, "rollback", warn_sigma=100)
    (stage,) = run.recipe["stages"]
    run.recipe["stages"] = [stage | {"name": "a", "tokens": 6 * 512}, stage | {"name": "b", "tokens": 26 * 512}]
    run.recipe["checkpoint"]["keep_last"] = 10
    inject(monkeypatch, {7: overflow, 31: overflow})
    assert run.train_here() == 0
    assert [(record["step_from"], record["step_to"]) for record in run.records("rollback")] == [(7, 4), (31, 28)]
    assert read_meta(run.run_dir / "checkpoints" / "step_00000007")["good"]


@pytest.mark.parametrize(
    ("good", "resumable", "moves"),
    [([4], [4, 8], True), ([4, 8], [4, 8], False), ([4], [4], False), ([], [4, 8], False), (None, [4, 8], False)],
    ids=["newest not good", "newest good", "newest passed over anyway", "none good", "unreadable"],
)
def test_only_checkpoints_that_are_newer_than_a_good_one_are_to_be_moved(
    good: list[int] | None, resumable: list[int], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are those of steps 4 and 8. What cannot be read is no reason to end without an account."""
    metas = {Path(str(step)): {"progress": {"step": step}, "good": step in (good or [])} for step in (8, 4)}

    def latest(_folder: Path, accept: Accept) -> Path | None:
        if good is None:
            raise UnreadableError("step_00000004/meta.json could not be read")
        return next((path for path, meta in metas.items() if accept(meta)), None)

    monkeypatch.setattr(recovery_module, "latest_checkpoint", latest)
    monkeypatch.setattr(recovery_module, "read_meta", metas.__getitem__)
    recovery = Recovery(
        SimpleNamespace(health=SimpleNamespace(spike=SimpleNamespace(reaction="rollback"))),  # type: ignore[arg-type]
        **dict.fromkeys(("model", "optimizer", "detector", "telemetry")),  # type: ignore[arg-type]
        checkpoints=SimpleNamespace(  # type: ignore[arg-type]
            wait=lambda: None,
            folder=Path("checkpoints"),
            is_resumable=lambda meta: meta["progress"]["step"] in resumable,
        ),
        progress=Progress(step=10),
    )
    assert ("move those newer than step 4 out of checkpoints" in recovery._from_before()) == moves
    assert bool(recovery._from_before()) == moves


@pytest.mark.parametrize(
    ("reaction", "applied_since", "is_doubted"),
    [
        ("log", 0, True),
        ("log", 1, False),
        ("rollback", 0, True),
        ("rollback", 1, False),
        ("skip_step", 0, True),
        ("skip_step", 1, True),
        ("skip_step", 2, False),
    ],
)
def test_the_newest_checkpoint_is_in_doubt_until_enough_steps_are_applied(
    reaction: str, applied_since: int, is_doubted: bool
) -> None:
    """With skip_step that takes two: a NaN in the optimizer's state reaches the weights in the first."""
    reasons: list[str] = []
    recovery = Recovery(
        SimpleNamespace(health=SimpleNamespace(spike=SimpleNamespace(reaction=reaction))),  # type: ignore[arg-type]
        **dict.fromkeys(("model", "optimizer", "detector", "telemetry")),  # type: ignore[arg-type]
        checkpoints=SimpleNamespace(  # type: ignore[arg-type]
            saved_step=8, trust=SimpleNamespace(trust_again=list), doubt=noting(reasons.append, lambda _: True)
        ),
        progress=Progress(step=8),
    )
    for step in range(9, 9 + applied_since):
        recovery.applied(step, 512 * step)
    report = SimpleNamespace(message="loss nan")
    assert bool(recovery._doubt_checkpoint(report)) == is_doubted  # type: ignore[arg-type]
    assert reasons == ["loss nan"] * is_doubted


def test_a_rollback_passes_over_a_damaged_checkpoint_and_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roll_back = Recovery._roll_back

    def damage_first(recovery: Recovery, stage: Stage, end: type[TrainingError]) -> None:
        recovery._checkpoints.checkpointer.wait()
        shard = run.newest_checkpoint / "rank_0_0.safetensors"
        shard.write_bytes(bytes(shard.stat().st_size))
        roll_back(recovery, stage, end)

    steady(run, "rollback", 12)
    run.recipe["checkpoint"]["keep_last"] = 20
    inject(monkeypatch, {10: not_a_number})
    monkeypatch.setattr(Recovery, "_roll_back", damage_first)
    assert run.train_here() == 0
    assert [(event["step_from"], event["step_to"]) for event in run.records("rollback")] == [(10, 4)]
    assert "step_00000008 is damaged: rank_0_0.safetensors: its SHA-256" in caplog.text
    assert (run.run_dir / "checkpoints" / "set-aside-step_00000008").is_dir()


def test_finite_steps_after_a_rollback_say_nothing_about_the_checkpoint_that_it_undid(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 14 has the weights of step 8, so the checkpoint of step 12 stays passed over, also by a later start."""
    steady(run, "rollback", 14)
    run.recipe["checkpoint"]["keep_last"] = 20
    inject(monkeypatch, {13: not_a_number})
    assert run.train_here() == 0
    assert [(event["step_from"], event["step_to"]) for event in run.records("rollback")] == [(13, 8)]
    assert not [record for record in run.records("warning") if "is used again" in record["message"]]
    for step in (13, 14):
        shutil.rmtree(run.run_dir / "checkpoints" / f"step_{step:08d}")
    assert run.train_here("--stop-at-step", "9") == 0
    assert run.records("resume")[-1]["step"] == 8


def test_the_checkpoint_to_roll_back_to_is_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of step 24 is good until step 25 is flagged; later ones, which `keep_last` counts, are no use at all."""
    steady(run, "rollback", 34)
    run.recipe["checkpoint"]["keep_last"] = 1
    inject(monkeypatch, {25: scaled_gradient, 33: not_a_number})
    assert run.train_here() == 0
    assert [(event["step_from"], event["step_to"]) for event in run.records("rollback")] == [(33, 20)]


def a_thousand_times(loss: Tensor) -> Tensor:
    return 1000 * loss


def test_a_spike_three_steps_after_a_switch_of_stage_is_not_applied(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage has no values of its own yet, also where the run is stopped and resumed inside its warm-up."""
    steady(run, "skip_step", 20)
    run.recipe["stages"].append({"name": "next", "seq_len": 64, "tokens": 6 * 512, "micro_batch_size": 4})
    changed = inject(monkeypatch, {23: a_thousand_times})
    assert run.train_here("--stop-at-step", "22") == 0
    assert run.train_here() == 0
    assert [(spike["step"], spike["action"]) for spike in run.records("spike")] == [(23, "skip")]
    assert "the most that a switch of stage explains" in run.records("spike")[0]["message"]
    assert [step for step, touched in changed if not touched] == [23]
