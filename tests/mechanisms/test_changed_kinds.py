"""Attention kinds with parameters in a run whose recipe changes: stages that have not begun are free, what is trained
stays, a rollback behind the beginning of a kind begins it anew."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moba_train.config.load import dump_config, load_config
from moba_train.registry import ATTENTION_KINDS
from moba_train.run.recipe_changes import recipe_changes
from moba_train.tools.cli import app
from moba_train.train import main
from tests.commands import run_app
from tests.forked import run_processes
from tests.run.faults import inject, overflow
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors
from tests.run.trainer_ranks import Ranks

NSA = {"compressed_block": 4, "stride": 2, "block_size": 8, "topk": 4, "window": 6}
SEER = {"block_size": 8, "topk": 3}
GATE = ".attention.nsa."


def with_sparse_stage(run: Run, steps: int = 8, **options: int) -> Run:
    """`run` with a third stage: native sparse attention in the first layer, MoBA in the second."""
    attention = {"full_layers": "none", "overrides": {0: {"kind": "nsa"}}, "nsa": NSA | options}
    sparse = {"name": "sparse", "seq_len": 128, "tokens": steps * 512, "micro_batch_size": 2, "attention": attention}
    run.recipe["stages"] = [*run.recipe["stages"][:2], sparse]
    return run


def refusal(run: Run, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Message of a run that is refused."""
    capsys.readouterr()
    assert run.train_here(*overrides) == 2
    return capsys.readouterr().err


def own(tensors: dict[str, Any]) -> dict[str, Any]:
    """Parameters of native sparse attention in a checkpoint."""
    return {name: tensor for name, tensor in tensors.items() if GATE in name}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    """A run of two stages that knows no kind with parameters. Not to be changed."""
    run = Run(tmp_path_factory.mktemp("finished"), corpora)
    assert run.train_here() == 0
    return run


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    """A run that is stopped in its second stage, before the one with native sparse attention. Not to be changed."""
    run = with_sparse_stage(Run(tmp_path_factory.mktemp("planned"), corpora))
    assert run.train_here("--stop-at-step", "8") == 0
    return run


def train_with_overflow(recipe: str, *steps: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, dict.fromkeys(steps, overflow))
        return main([recipe])


def train_alone(rank: int, recipe: str, *steps: int) -> None:
    """In a process of its own: `deterministic` must come before its first use of a GPU."""
    assert train_with_overflow(recipe, *steps) == 0


@pytest.mark.parametrize("parallel", [{}, {"cp": 2}, {"pp": 2}], ids=["alone", "cp", "pp"])
def test_a_rollback_behind_the_beginning_of_a_kind_begins_it_anew(
    finished: Run, tmp_path: Path, corpora: Path, ranks: Ranks, parallel: dict[str, int]
) -> None:
    def train(run: Run, steps: tuple[int, ...]) -> None:
        run.recipe["parallel"] = parallel
        if parallel:
            ranks.work(train_with_overflow, [str(run.write_recipe()), *steps], 2)
        else:
            assert train_with_overflow(str(run.write_recipe()), *steps) == 0

    def later(folder: Path) -> Run:
        return with_sparse_stage(Run(folder, corpora))

    assert_a_rollback_begins_the_kind_anew(finished, later, train, tmp_path)


@pytest.mark.gpu
def test_a_rollback_on_a_gpu_begins_a_kind_anew(tmp_path: Path, corpora: Path) -> None:
    """In bf16, with heads and blocks that the kernels of real training take."""

    def sized(run: Run) -> Run:
        run.recipe |= {"deterministic": True}
        run.recipe["model"] |= {"hidden_size": 256}
        run.recipe["attention"]["moba"]["block_size"] = 64
        for stage in run.recipe["stages"][1:]:
            stage |= {"seq_len": 512, "micro_batch_size": 1}
        return run

    def later(folder: Path) -> Run:
        options = {"compressed_block": 32, "stride": 16, "block_size": 64, "window": 64}
        return sized(with_sparse_stage(Run(folder, corpora), **options))

    def train(run: Run, steps: tuple[int, ...]) -> None:
        run_processes(train_alone, (str(run.write_recipe()), *steps), 1, "cuda")

    (tmp_path / "before").mkdir()
    before = sized(Run(tmp_path / "before", corpora))
    code, output = before.train_on_gpu()
    assert code == 0, output
    assert_a_rollback_begins_the_kind_anew(before, later, train, tmp_path)


def assert_a_rollback_begins_the_kind_anew(
    finished: Run, later: Callable[[Path], Run], train: Callable[[Run, tuple[int, ...]], None], folder: Path
) -> None:
    """Bitwise: the stage came with a resumed recipe, and the run goes back from its fourth step to a checkpoint that
    does not have its kind. A run that skips those steps reaches the same point without a rollback.

    later: makes, in a folder, the run that has the stage; train: trains it with an overflow in some steps.
    """
    runs: list[Run] = []
    for reaction, steps in (("rollback", (16,)), ("skip_step", (13, 14, 15, 16))):
        run = later(folder / reaction)
        run.folder.mkdir()
        run.take_over(finished, 12)
        run.recipe["health"] = {"spike": {"reaction": reaction}}
        run.recipe["evaluation"]["every"] = 7
        train(run, steps)
        runs.append(run)
    back, skipping = runs
    assert [(event["step"], event["step_to"]) for event in back.records("rollback")] == [(16, 12)]
    assert [event["step"] for event in skipping.records("spike")] == [13, 14, 15, 16]
    folders = [run.run_dir / "checkpoints" for run in runs]
    first = own(checkpoint_tensors(folders[0] / "step_00000016"))
    assert first
    assert not any(tensor.any() for name, tensor in first.items() if name.startswith("optim."))
    assert_same_tensors(folders[0] / "step_00000016", folders[1] / "step_00000016")
    assert_same_tensors(back.newest_checkpoint, skipping.newest_checkpoint)
    assert back.losses()[16:] == skipping.losses()[16:]
    last = own(checkpoint_tensors(back.newest_checkpoint))
    assert any(not torch.equal(last[name], first[name]) for name in last)


def test_a_kind_of_a_stage_that_has_not_begun_may_be_dropped_or_shaped_otherwise(
    planned: Run, tmp_path: Path, corpora: Path
) -> None:
    """The changed kind begins as in a run that had the last recipe from the start."""
    reshaped = with_sparse_stage(Run(tmp_path, corpora), compressed_block=8)
    reshaped.take_over(planned, 8)
    assert reshaped.train_here() == 0
    (event,) = reshaped.records("resume")
    parameters = own(checkpoint_tensors(reshaped.newest_checkpoint))
    before = own(checkpoint_tensors(planned.newest_checkpoint))
    new = sum(
        x.numel() for name, x in parameters.items() if name.startswith("model.") and x.shape != before[name].shape
    )
    said = f"; {new:,} parameters of 'nsa' begin again: the checkpoint does not have them in this shape"
    assert event["message"].endswith(said)
    fresh = with_sparse_stage(Run(tmp_path / "fresh", corpora), compressed_block=8)
    fresh.folder.mkdir()
    assert fresh.train_here() == 0
    assert reshaped.losses() == fresh.losses()
    assert_same_tensors(reshaped.newest_checkpoint, fresh.newest_checkpoint)

    dropped = Run(tmp_path / "dropped", corpora)
    dropped.folder.mkdir()
    dropped.take_over(planned, 8)
    assert dropped.train_here() == 0
    assert len(dropped.losses()) == 12
    assert not own(checkpoint_tensors(dropped.newest_checkpoint))
    assert "anew" not in dropped.records("resume")[0]["message"]


def test_a_rollback_finds_older_checkpoints_with_the_kind_dropped_or_in_another_shape(
    planned: Run, tmp_path: Path, corpora: Path
) -> None:
    """Steps 4 and 8 were saved with the recipe before."""
    for run in (
        with_sparse_stage(Run(tmp_path / "reshaped", corpora), compressed_block=8),
        Run(tmp_path / "dropped", corpora),
    ):
        run.folder.mkdir()
        run.take_over(planned, 8)
        run.recipe["health"] = {"spike": {"reaction": "rollback"}}
        assert train_with_overflow(str(run.write_recipe()), 10) == 0
        assert [(event["step"], event["step_to"]) for event in run.records("rollback")] == [(10, 8)]


def test_a_kind_that_a_stage_has_trained_stays(
    planned: Run, tmp_path: Path, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused with the stage's key: dropping it, another shape, and a kind with parameters in a stage that has begun
    without it."""
    run = with_sparse_stage(Run(tmp_path, corpora))
    run.take_over(planned, 8)
    assert run.train_here("--stop-at-step", "14") == 0
    had = "stages[2].attention: parameters of kind 'nsa' in layer 0 were "

    with_sparse_stage(run, compressed_block=8)
    message = refusal(run, capsys)
    assert had in message
    assert "compress_k.up.weight [8, 32]" in message
    assert "compress_k.up.weight [8, 64]" in message
    assert "gate" not in message, "only what differs is named"
    assert "run_dir to a new folder and init_from: " in message

    run.recipe["stages"][2]["attention"] = {"default": "full"}
    message = refusal(run, capsys)
    assert had in message
    assert "when it was saved and are none now; stages that have begun keep their kinds with parameters" in message

    with_sparse_stage(run).recipe["stages"][1]["attention"] = {"default": "seer", "seer": SEER}
    message = refusal(run, capsys)
    assert "stages[1].attention: parameters of kind 'seer' in layer 0 were none when it was saved and are" in message

    run.recipe["stages"][1].pop("attention")
    assert run.train_here() == 0, "the recipe as it was"


def test_what_a_kind_has_learned_survives_a_second_change_of_the_recipe(
    planned: Run, tmp_path: Path, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first change moves the stage that has trained the kind off it, and a later stage keeps it. From then on no
    stage that has begun uses the kind, and yet dropping or reshaping it is refused."""
    run = with_sparse_stage(Run(tmp_path, corpora))
    run.take_over(planned, 8)
    assert run.train_here("--stop-at-step", "14") == 0
    trained = own(checkpoint_tensors(run.newest_checkpoint))

    (*begun, sparse) = run.recipe["stages"]
    dense = sparse | {"tokens": 4 * 512, "attention": {"default": "full"}}
    later = sparse | {"name": "later"}
    run.recipe["stages"] = [*begun, dense, later]
    assert run.train_here("--stop-at-step", "16") == 0

    run.recipe["stages"] = [*begun, dense, dense | {"name": "later"}]
    message = " ".join(refusal(run, capsys).split())
    assert "stages[3].attention: parameters of kind 'nsa' in layer 0 were " in message
    assert "are none now; a stage that has begun has trained them, by an earlier recipe of this run" in message
    assert "restore this stage's attention, or add a stage that uses the kind in these layers" in message
    assert "set run_dir to a new folder and init_from: " in message

    reshaped = sparse["attention"] | {"nsa": NSA | {"compressed_block": 8}}
    run.recipe["stages"] = [*begun, dense, later | {"attention": reshaped}]
    message = refusal(run, capsys)
    assert "compress_k.up.weight [8, 64]" in message
    assert " now; a stage that has begun has trained them" in message

    run.recipe["stages"] = [*begun, dense, dense | {"name": "between"}, later]
    assert run.train_here("--stop-at-step", "17") == 0, "another stage may come first"
    (event,) = run.records("resume")[-1:]
    assert "anew" not in event["message"]
    kept = own(checkpoint_tensors(run.newest_checkpoint))
    weights = [name for name in trained if name.startswith("model.")]
    assert all(torch.equal(kept[name], trained[name]) for name in weights)
    assert any(trained[name.replace("model.", "optim.", 1) + ".exp_avg"].any() for name in weights), "they have learned"


def test_layers_whose_trained_parameters_would_be_dropped_are_named_together(
    tmp_path: Path, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, corpora)
    run.recipe["stages"][0]["attention"] = {"default": "seer", "full_layers": "none", "seer": SEER}
    assert run.train_here("--stop-at-step", "1") == 0
    run.recipe["stages"][0]["attention"] = {"default": "full"}
    message = refusal(run, capsys)
    assert "stages[0].attention: parameters of kind 'seer' in layers 0-1 were " in message


def test_another_optimizer_is_refused_with_its_key_and_what_can_be_done(
    finished: Run, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.take_over(finished, 12)
    run.recipe["stages"][1]["tokens"] += 512
    message = refusal(run, capsys, "optim.kind=muon")
    assert "optim.kind was 'adamw' when it was saved and is 'muon' now" in message
    assert "exp_avg" not in message
    (advice,) = [line for line in message.splitlines() if "init_from: " in line]
    source = advice.partition("init_from: ")[2].partition(",")[0]

    shutil.copytree(source, run.folder / "weights")
    run.recipe |= {"run_dir": str(run.folder / "new"), "init_from": str(run.folder / "weights")}
    run.recipe["model"]["rope"] = {"theta": 50000}
    assert run.train_here("optim.kind=muon", "--stop-at-step", "1") == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    """A finished run whose model has native sparse attention. Not to be changed."""
    run = with_sparse_stage(Run(tmp_path_factory.mktemp("trained"), corpora), steps=2)
    run.recipe["stages"] = run.recipe["stages"][2:]
    assert run.train_here() == 0
    return run


def plan(run: Run) -> tuple[int, str]:
    """Exit code and output, on one line, of `moba-train plan`."""
    result = CliRunner().invoke(app, ["plan", str(run.write_recipe())])
    return result.exit_code, " ".join(result.output.split())


def test_a_run_begins_without_the_kinds_of_the_weights_that_it_does_not_use(
    trained: Run, tmp_path: Path, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan` and training say what is left out, and the rest arrives bit by bit. A kind that both use is loaded."""
    run = Run(tmp_path, corpora)
    run.recipe["init_from"] = str(trained.run_dir)
    run.recipe["stages"] = [{"name": "on", "seq_len": 128, "tokens": 2 * 512, "lr": 1e-30, "micro_batch_size": 2}]
    said = "of attention kind 'nsa' in layer 0, which no stage of this recipe uses there: they are left out"
    code, output = plan(run)
    assert code == 0
    assert said in output
    assert run.train_here("--stop-at-step", "1") == 0
    assert said in capsys.readouterr().out
    (event,) = run.records("init_from")
    weights = {name: x for name, x in checkpoint_tensors(trained.newest_checkpoint).items() if "model." in name}
    assert f"{len(own(weights))} of attention kinds that no stage uses there (nsa) are left out" in event["message"]
    begun = checkpoint_tensors(run.newest_checkpoint)
    assert not own(begun)
    for name in weights.keys() - own(weights).keys():
        assert torch.equal(begun[name], weights[name]), name
    assert said not in plan(run)[1], "the run has begun and does not read init_from again"

    run.recipe |= {"run_dir": str(tmp_path / "same"), "stages": trained.recipe["stages"]}
    run.recipe["stages"][0]["lr"] = 1e-30
    assert "they are left out" not in plan(run)[1]
    assert run.train_here("--stop-at-step", "1") == 0
    begun = checkpoint_tensors(run.newest_checkpoint)
    assert all(torch.equal(begun[name], tensor) for name, tensor in weights.items())


def test_weights_of_a_kind_in_another_shape_are_refused_before_training(
    trained: Run, tmp_path: Path, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan and training refuse the weights with the same words."""
    run = with_sparse_stage(Run(tmp_path, corpora), compressed_block=8)
    run.recipe["init_from"] = str(trained.run_dir)
    said = "attention.nsa: gives layer 0 parameters compress_k.positions [8, 8]"
    code, output = plan(run)
    assert code == 2
    assert said in output
    assert "the options that shape them must be those of that run" in output
    assert said in " ".join(refusal(run, capsys).split())


def test_a_trained_model_is_evaluated_without_a_kind_that_an_override_takes_away(trained: Run) -> None:
    """Also without one that has no full attention on its weights, as `--attention full` says; a kind that the model was
    not trained with is refused."""
    command = ["eval", str(trained.run_dir), "--tasks", "validation_loss"]

    def losses(*arguments: str) -> dict[str, str]:
        found = run_app(app, *command, *arguments).output.splitlines()
        return {words[0]: words[3] for line in found if "validation loss" in line and (words := line.split())}

    own, without = losses(), losses("stages.0.attention.overrides={}", "stages.0.attention.default=full")
    assert [*own] == ["moba+nsa"]
    assert [*without] == ["moba", "full"], "the recipe's and the stage's"
    assert len({*own.values(), *without.values()}) == 3
    refused = run_app(app, *command, "--attention", "full", code=2)
    assert "layers of nsa have no full attention on the same weights; allowed:" in " ".join(refused.output.split())
    refused = run_app(app, *command, "stages.0.attention.default=seer", code=2)
    assert "attention.seer.k_weight: not in the checkpoint" in " ".join(refused.output.split())


def test_options_that_only_one_of_two_recipes_writes_down_are_no_change(run: Run) -> None:
    """A recipe in a checkpoint may have the default options of kinds that it does not use."""
    recipe = load_config(run.write_recipe())
    all_kinds = {kind: ATTENTION_KINDS[kind].Options().model_dump(mode="json") for kind in ATTENTION_KINDS}
    run.recipe["attention"] = {**all_kinds, **run.recipe["attention"]}
    before = dump_config(load_config(run.write_recipe()))
    assert before != dump_config(recipe)
    assert recipe_changes(before, dump_config(recipe)) == {}
    assert recipe_changes(dump_config(recipe), before) == {}


def test_a_changed_option_of_a_kind_that_had_none_is_named_with_its_default(run: Run) -> None:
    before = dump_config(load_config(run.write_recipe()))
    run.recipe["attention"]["nsa"] = {"window": 16}
    changed = dump_config(load_config(run.write_recipe()))
    assert recipe_changes(before, changed) == {"attention.nsa.window": [512, 16]}
    assert recipe_changes(changed, before) == {"attention.nsa.window": [16, 512]}
