"""What is written down of a spike, and how `moba-train inspect-spike` shows it."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import yaml
from typer.testing import CliRunner

from moba_train.config.health import HealthConfig, SpikeConfig
from moba_train.config.load import load_config
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loader import step_batches
from moba_train.data.samples import StageData
from moba_train.health.dump import GATE, Dump, _write, dump_folder
from moba_train.tools.cli import app
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


def test_the_dump_and_the_log_say_how_the_chosen_blocks_are_spread(
    skipping: tuple[Run, list[tuple[int, bool]]],
) -> None:
    run, _ = skipping
    moba, full = run.dump(POISONED)["attention"]
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
    found = run.dump(POISONED) | {"stage": "a[/b]"}
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
