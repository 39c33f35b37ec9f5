"""Faults in the middle of training: every one is seen, what the recipe says happens, and the weights stay sound."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import yaml
from faults import inject, not_a_number, not_a_number_on_rank_1, overflow, scaled_gradient, steady
from tiny_run import VOCAB, Run, assert_same_tensors
from torch import Tensor
from trainer_ranks import Ranks
from typer.testing import CliRunner

from moba_train.checkpoint.manifest import read_meta
from moba_train.cli import app
from moba_train.config.load import load_config
from moba_train.config.run import HealthConfig, SpikeConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loader import step_batches
from moba_train.data.samples import StageData
from moba_train.errors import TrainingError
from moba_train.health.dump import GATE, Dump, _write, dump_folder
from moba_train.optim.schedule import stage_learning_rate
from moba_train.strict_json import from_json
from moba_train.train import main
from moba_train.training.recovery import Recovery

FAULTS = {22: scaled_gradient, 26: overflow, 30: not_a_number}
POISONED = 36
STEPS = 40


def dump(run: Run, step: int) -> dict[str, Any]:
    return from_json((dump_folder(run.run_dir) / f"step_{step:08d}.json").read_text())


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> tuple[Run, list[tuple[int, bool]]]:
    """A run that skips four faulty steps, and which of its steps changed weights or optimizer."""
    run = steady(Run(tmp_path_factory.mktemp("skipping"), corpora), "skip_step", STEPS)
    with pytest.MonkeyPatch.context() as patch:
        changed = inject(patch, FAULTS, (POISONED,))
        assert run.train_here() == 0
    return run, changed


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
    (stage,) = resolve_stages(config)
    records = run.records()
    assert [(record["step"], record["tokens"]) for record in records] == [(s, 512 * s) for s in range(1, STEPS + 1)]
    for record in records:
        expected = stage_learning_rate([stage], 0, config.optim.schedule, record["tokens"])
        assert record["lr"] == pytest.approx(expected)


def test_the_dump_holds_the_batch_and_the_numbers_of_its_step(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    run, _ = skipping
    config = load_config(run.write_recipe())
    (stage,) = resolve_stages(config)
    data = StageData(stage.sources, stage.seq_len, STEPS * stage.batch_sequences, config.seed, {}, VOCAB)
    for step in (22, POISONED):
        found = dump(run, step)
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
        parts = [layer["norm"] for layer in norms["layers"]] + [norms[key] for key in ("embedding", "norm", "output")]
        assert math.hypot(*parts) == pytest.approx(found["grad_norm"], rel=1e-5)
        assert norms["kinds"] == pytest.approx({"moba": parts[0], "full": parts[1]})
        assert all(0 < layer["max_lse"] < 20 for layer in rank["attention"])
        assert rank["attention"] == found["attention"]


def test_the_dump_and_the_log_say_how_the_chosen_blocks_are_spread(
    skipping: tuple[Run, list[tuple[int, bool]]],
) -> None:
    run, _ = skipping
    moba, full = dump(run, POISONED)["attention"]
    assert list(full) == ["max_lse"]
    spike = run.records("spike")[-1]
    assert {name: moba[name] for name in GATE} == {
        name.removeprefix("gate_"): value for name, value in spike.items() if name.startswith("gate_")
    }
    code, output = invoke("inspect-spike", str(run.run_dir))
    assert code == 0, output
    (row,) = re.findall(r"^ *0 +moba .*$", output, re.MULTILINE)
    assert row.split()[-6:] == [f"{number:.4g}" for number in moba.values()]


def test_a_fault_of_the_machine_is_told_from_one_of_the_data(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    """The dump repeats the batch with the step's weights: poisoned data fail again, a fault in the step does not."""
    run, _ = skipping
    (machine,), (data,) = dump(run, 30)["ranks"], dump(run, POISONED)["ranks"]
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
    assert dump(run, 18)["action"] == "apply"
    unseen = steady(Run(tmp_path / "unseen", corpora), "log", 20)
    unseen.take_over(run, 16)
    shutil.rmtree(dump_folder(unseen.run_dir))
    monkeypatch.setattr("moba_train.training.recovery.write_dump", lambda *_arguments, **_named: Dump([], {}))
    assert unseen.train_here() == 0
    assert not dump_folder(unseen.run_dir).exists()
    assert unseen.losses() == run.losses()


def test_a_dump_of_an_earlier_version_is_shown(skipping: tuple[Run, list[tuple[int, bool]]], tmp_path: Path) -> None:
    run, _ = skipping
    found = dump(run, POISONED)
    moba, _ = found.pop("attention")
    (rank,) = found["ranks"]
    del rank["attention"]
    rank |= {"max_lse": [moba["max_lse"], None], "gate": [{"selected": 8, "entropy": 0.123}, None]}
    dump_folder(tmp_path).mkdir()
    (dump_folder(tmp_path) / "step_00000036.json").write_text(json.dumps(found))
    shutil.copy(run.run_dir / "config.yaml", tmp_path)
    code, output = invoke("inspect-spike", str(tmp_path))
    assert code == 0, output
    (row,) = re.findall(r"^ *0 +moba .*$", output, re.MULTILINE)
    assert row.split()[-2:] == [f"{moba['max_lse']:.4g}", "0.123"]


def test_that_a_checkpoint_is_used_again_is_said(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    run, _ = skipping
    said = [record["message"] for record in run.records("warning")]
    passed_over, again = (
        [match[1] for text in said if (match := re.match(rf"the checkpoint of step (\d+) is {how}", text))]
        for how in ("passed over from now on", "used again")
    )
    assert passed_over == again != []


def test_the_numbers_of_a_dump_are_not_cut_off(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    """In a file or a pipe, whose width is not known."""
    run, _ = skipping
    code, output = invoke("inspect-spike", str(run.run_dir))
    assert code == 0, output
    assert re.search("^ *layer +kind +gradient norm ", output, re.MULTILINE)
    assert "embedding" in output
    assert "…" not in output


def test_names_with_brackets_are_printed_as_they_are(
    skipping: tuple[Run, list[tuple[int, bool]]], tmp_path: Path
) -> None:
    """rich would take them for its markup, leave them out, or refuse them."""
    run, _ = skipping
    shutil.copy(run.run_dir / "config.yaml", tmp_path)
    found = dump(run, POISONED) | {"stage": "a[/b]"}
    for part in (part for parts in found["ranks"][0]["micro_batches"] for part in parts):
        part["source"] = "/data/[old]/one"
    dump_folder(tmp_path).mkdir()
    (dump_folder(tmp_path) / "step_00000036.json").write_text(json.dumps(found))
    code, output = invoke("inspect-spike", str(tmp_path))
    assert code == 0, output
    assert "stage a[/b], " in output
    assert "/data/[old]/one document" in output


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_inspect_spike_shows_the_documents_of_the_batch_the_worst_first(
    skipping: tuple[Run, list[tuple[int, bool]]],
) -> None:
    run, _ = skipping
    code, output = invoke("inspect-spike", str(run.run_dir))
    assert code == 0, output
    assert f"step {POISONED}, stage long" in output
    assert "other dumps of this run: 22, 26, 30" in output
    assert "; action: skip " in " ".join(output.split()), "as the event and the dump call it; the reaction is skip_step"
    losses = [float(loss) for loss in re.findall(r"^loss (\S+) over", output, re.MULTILINE)]
    assert len(losses) > 1
    assert losses == sorted(losses, reverse=True)
    source, document, start, stop = re.findall(r"(\S+) document (\d+) tokens (\d+):(\d+)", output)[0]
    assert " ".join(map(str, IndexedDataset(source).document(int(document), int(start), int(stop)))) in output


def test_inspect_spike_decodes_with_the_tokenizer_of_the_run(
    skipping: tuple[Run, list[tuple[int, bool]]], tmp_path: Path
) -> None:
    run, _ = skipping
    shutil.copytree(dump_folder(run.run_dir), dump_folder(tmp_path))
    text = [re.sub("[^a-z]", " ", line) for line in Path(__file__).read_text().splitlines()]
    with (tmp_path / "tok.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=model, vocab_size=VOCAB, model_type="bpe", minloglevel=2
        )
    recipe = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    recipe["data"]["tokenizer"] = str(tmp_path / "tok.model")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe))
    code, output = invoke("inspect-spike", str(tmp_path), "--documents", "1")
    assert code == 0, output
    source, document, start, stop = re.findall(r"(\S+) document (\d+) tokens (\d+):(\d+)", output)[0]
    ids = IndexedDataset(source).document(int(document), int(start), int(stop)).tolist()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tok.model"))
    assert processor.decode(ids)[:20] in output


def test_inspect_spike_decodes_with_a_tokenizer_json_too(
    skipping: tuple[Run, list[tuple[int, bool]]], tmp_path: Path
) -> None:
    package = pytest.importorskip("tokenizers")
    run, _ = skipping
    shutil.copytree(dump_folder(run.run_dir), dump_folder(tmp_path))
    words = package.models.WordLevel({f"word{i}": i for i in range(VOCAB)}, unk_token="word0")
    package.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    recipe = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    recipe["data"]["tokenizer"] = str(tmp_path / "tokenizer.json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe))
    code, output = invoke("inspect-spike", str(tmp_path), "--documents", "1")
    assert code == 0, output
    assert re.search(r"word\d+ word\d+", output)


def test_a_dump_that_is_not_there_is_refused(skipping: tuple[Run, list[tuple[int, bool]]], tmp_path: Path) -> None:
    run, _ = skipping
    code, output = invoke("inspect-spike", str(run.run_dir), "--step", "7")
    assert code == 2
    assert "22, 26, 30, 36" in output
    code, output = invoke("inspect-spike", str(tmp_path))
    assert code == 2
    assert "spikes" in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"micro_batches"', '"other"'), "lacks 'micro_batches': it was not written by this"),
        (lambda text: text[: len(text) // 2], "is no dump of a spike"),
        (lambda text: "[1]", "is no dump of a spike"),
    ],
    ids=["older", "cut short", "a list"],
)
def test_a_dump_that_cannot_be_read_is_named_with_what_is_wrong(
    skipping: tuple[Run, list[tuple[int, bool]]], tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    run, _ = skipping
    shutil.copytree(dump_folder(run.run_dir), dump_folder(tmp_path))
    path = dump_folder(tmp_path) / f"step_{POISONED:08d}.json"
    path.write_text(change(path.read_text()))
    (path.parent / "step_of_mine.json").write_text("{}")
    code, output = invoke("inspect-spike", str(tmp_path))
    assert code == 2
    assert f"{path.name} {message}" in output


def test_a_disk_that_fills_up_leaves_no_half_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    _write(dump_folder(tmp_path) / "step_00000022.json", {"step": 22})
    code, output = invoke("inspect-spike", str(tmp_path))
    assert code == 2
    assert "holds no dumps" in output


def test_what_the_guide_says_about_spikes_works(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    run, _ = skipping
    guide = (Path(__file__).parents[2] / "docs" / "run-health.md").read_text()
    commands = re.findall(r"^moba-train (inspect-spike [^#\n]*)", guide, re.MULTILINE)
    assert commands
    for command in commands:
        code, output = invoke(*command.replace("RUN", str(run.run_dir)).split())
        assert code == 0, output
    (recipe,) = re.findall(r"```yaml\n(health:\n  spike:.*?)```", guide, re.DOTALL)
    spike = HealthConfig.model_validate(yaml.safe_load(recipe)["health"]).spike
    assert spike == SpikeConfig(reaction="rollback")


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


def test_a_rollback_behind_the_comparison_of_a_boundary_does_not_repeat_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage next begins at step 8 and is compared at step 18; the run goes back from step 20 to step 16."""
    steady(run, "rollback", 8)
    run.recipe["stages"].append(run.recipe["stages"][0] | {"name": "next", "tokens": 20 * 512})
    inject(monkeypatch, {20: overflow})
    assert run.train_here() == 0
    assert [(event["step"], event["step_to"]) for event in run.records("rollback")] == [(20, 16)]
    assert [event["step"] for event in run.records("boundary")] == [18]


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


def test_the_end_names_the_stage_s_own_keys_and_the_checkpoint_from_before_the_spike(
    rolled_back: Run, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of step 32 comes two steps after a flagged one; it is what the same command would go on from."""
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
    seen = dump(run, 4)["ranks"]
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
    seen = dump(run, 4)
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


def test_a_rollback_passes_over_a_damaged_checkpoint_and_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roll_back = Recovery._roll_back

    def damage_first(recovery: Recovery, stage: Stage, end: type[TrainingError]) -> None:
        recovery._checkpoints._checkpointer.wait()
        shard = run.newest_checkpoint / "__0_0.distcp"
        shard.write_bytes(bytes(shard.stat().st_size))
        roll_back(recovery, stage, end)

    steady(run, "rollback", 12)
    run.recipe["checkpoint"]["keep_last"] = 20
    inject(monkeypatch, {10: not_a_number})
    monkeypatch.setattr(Recovery, "_roll_back", damage_first)
    assert run.train_here() == 0
    assert [(event["step_from"], event["step_to"]) for event in run.records("rollback")] == [(10, 4)]
    assert "step_00000008 is damaged: __0_0.distcp: its SHA-256" in caplog.text
    assert (run.run_dir / "checkpoints" / "set-aside-step_00000008").is_dir()


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
