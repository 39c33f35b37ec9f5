"""`moba-train inspect-spike` shows the documents of a spike, and refuses what is no dump of one."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import yaml

from moba_train.config.health import HealthConfig, SpikeConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.health.dump import GATE, _write, dump_folder
from moba_train.tools.cli import app
from tests.commands import run_app
from tests.run.conftest import skipping
from tests.run.faults import POISONED
from tests.run.tiny_run import VOCAB, Run

__all__ = ["skipping"]


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
    output = run_app(app, "inspect-spike", run.run_dir).output
    (row,) = re.findall(r"^ *0 +moba .*$", output, re.MULTILINE)
    assert row.split()[-6:] == [f"{number:.4g}" for number in moba.values()]


def test_the_numbers_of_a_dump_are_not_cut_off(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    """In a file or a pipe, whose width is not known."""
    run, _ = skipping
    output = run_app(app, "inspect-spike", run.run_dir).output
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
    output = run_app(app, "inspect-spike", tmp_path).output
    assert "stage a[/b], " in output
    assert "/data/[old]/one document" in output


def test_inspect_spike_shows_the_documents_of_the_batch_the_worst_first(
    skipping: tuple[Run, list[tuple[int, bool]]],
) -> None:
    run, _ = skipping
    output = run_app(app, "inspect-spike", run.run_dir).output
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
    output = run_app(app, "inspect-spike", tmp_path, "--documents", "1").output
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
    output = run_app(app, "inspect-spike", tmp_path, "--documents", "1").output
    assert re.search(r"word\d+ word\d+", output)


def test_a_dump_that_is_not_there_is_refused(skipping: tuple[Run, list[tuple[int, bool]]], tmp_path: Path) -> None:
    run, _ = skipping
    output = run_app(app, "inspect-spike", run.run_dir, "--step", "7", code=2).output
    assert "22, 26, 30, 36" in output
    output = run_app(app, "inspect-spike", tmp_path, code=2).output
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
    output = run_app(app, "inspect-spike", tmp_path, code=2).output
    assert f"{path.name} {message}" in output


def test_a_disk_that_fills_up_leaves_no_half_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    _write(dump_folder(tmp_path) / "step_00000022.json", {"step": 22})
    output = run_app(app, "inspect-spike", tmp_path, code=2).output
    assert "holds no dumps" in output


def test_what_the_guide_says_about_spikes_works(skipping: tuple[Run, list[tuple[int, bool]]]) -> None:
    run, _ = skipping
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "monitor.md").read_text()
    commands = re.findall(r"^moba-train (inspect-spike [^#\n]*)", guide, re.MULTILINE)
    assert commands
    for command in commands:
        run_app(app, *command.replace("RUN", str(run.run_dir)).split())
    (recipe,) = re.findall(r"```yaml\n(health:\n  spike:.*?)```", guide, re.DOTALL)
    spike = HealthConfig.model_validate(yaml.safe_load(recipe)["health"]).spike
    assert spike == SpikeConfig(reaction="rollback")
