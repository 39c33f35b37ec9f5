"""What `moba-train plan` prints of corpora, pipelines, warnings and a run that has begun."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.checkpoint.manifest import META, read_meta
from moba_train.checkpoint.retention import Mark, Marks
from moba_train.tools.cli import app
from moba_train.tools.plan.render import print_plan
from tests.commands import run_app
from tests.memory.test_flops import SEQ_LEN, packed_run, planned
from tests.resolve.test_recipe_warnings import NEVER, VALIDATION
from tests.resolve.test_validate_files import corpus
from tests.resolved import plan_of
from tests.run.tiny_run import Run
from tests.small_recipe import Load


def test_corpora_smaller_than_a_batch_are_named(tmp_path: Path) -> None:
    """A third of 16 sequences from 40 tokens."""
    config = packed_run(tmp_path, "concat")
    assert planned(config).documents.warnings == ()
    with IndexedDatasetWriter(tmp_path / "one", np.int32) as writer:
        writer.add_document(np.arange(40))
    text = io.StringIO()
    print_plan(plan_of(config, 1), Console(file=text, width=100))
    warning = f"warning: stage only: corpus {tmp_path / 'one'} has 40 tokens, fewer than a batch ({8 * SEQ_LEN:,})"
    assert f"{warning}: the stage reads it about {5 * SEQ_LEN / 40:,.1f} times" in text.getvalue()


def test_times_of_a_tiny_model_are_not_printed_as_zero(load: Load) -> None:
    console = Console(record=True, width=200)
    print_plan(plan := plan_of(load(), 1), console)
    text = console.export_text()
    (row,) = (line for line in text.splitlines() if "the whole step" in line)
    assert [float(cell) for cell in row.split("│")[2:-1]] == pytest.approx(
        [step.time.seconds for step in plan.steps], rel=0.5
    )


def test_a_pipeline_is_shown(load: Load) -> None:
    config = load("parallel.pp=2")
    plan = plan_of(config, 4)
    assert all(step.time.pp > 0 for step in plan.steps)
    for item in plan.stages:
        assert item.mesh.pp == 2
        assert item.memory.total == max(memory.total for memory in item.activations.rank_memory)
        weights = sum(memory.parameters for memory in item.activations.rank_memory)
        assert weights * item.mesh.shards == pytest.approx(4 * plan.parameters.total, rel=1e-3)
    console = Console(record=True, width=200)
    print_plan(plan, console)
    text = console.export_text()
    for word in ("pp 2 x", "waiting for other ranks", "total of each rank", "best for all stages together"):
        assert word in text


def test_warnings_about_the_recipe_are_printed_once_and_unchanged(recipe: Path) -> None:
    for layout in ([], ["--nodes", "1"]):
        arguments = [str(recipe), VALIDATION, *NEVER, "--no-data", *layout, "--gpu", "h200"]
        done = run_app(app, "plan", *arguments)
        (line,) = [line for line in done.output.splitlines() if line.startswith("warning: ")]
        assert "stages[i].evaluate is false in all of them" in line


def test_it_says_what_a_start_would_find_in_the_run_folder(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """In the words of training, with every way to plan; a checkpoint that is simply resumed from is no warning."""

    def warnings(*arguments: str) -> list[str]:
        command = ["plan", str(run.write_recipe()), *arguments]
        done = run_app(app, *command)
        return [line for line in done.output.splitlines() if "training would" in line or "init_from" in line]

    assert warnings() == []
    assert run.train_here("--stop-at-step", "4") == 0
    assert warnings() == []
    ignored = f"init_from={run.run_dir}"
    (warning,) = warnings(ignored)
    assert warning.startswith(f"warning: init_from: {run.run_dir} will not be read, because the run continues from its")
    assert str(run.newest_checkpoint) in warning
    run.recipe["stages"][0]["seq_len"] = 32
    capsys.readouterr()
    assert run.train_here() == 2
    refusal = capsys.readouterr().err.strip().removeprefix("error: ")
    assert "stages[0].seq_len was 64 when it was saved and is 32 now" in refusal
    expected = [f"warning: training would refuse this recipe: {refusal}"]
    assert warnings() == warnings(ignored, "--no-data") == warnings("--nodes", "1", "--gpus-per-node", "1") == expected
    assert warnings(ignored, f"run_dir={run.folder / 'elsewhere'}") == []
    Marks([Mark(4, read_meta(run.newest_checkpoint)["save_id"], "poisoned")]).write(run.run_dir / "checkpoints")
    assert warnings() == expected, "training takes a marked one where there is no other"
    (run.newest_checkpoint / META).write_text("{")
    checkpoints = run.run_dir / "checkpoints"
    assert warnings() == [
        f"warning: training would refuse this recipe: no checkpoint in {checkpoints} is complete and finite"
    ]


def test_corpora_of_different_tokenizers_are_refused(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "one", "tok.model", b"one")
    corpus(tmp_path / "other", "other.json", b"other")
    corpora = ["data.train=[{path: one}]", "stages.1.train=[{path: other}]"]
    done = run_app(app, "plan", recipe, *corpora, code=2)
    assert "the corpus other was made with the tokenizer other.json" in done.stderr
