"""A run resumes with the corpora that it was trained and evaluated on, wherever they are, and with no others."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.config.load import load_config
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loader import training_data
from moba_train.data.loss_mask import mask_prefix
from tests.resolved import samples_of, stages_of
from tests.run.tiny_run import VOCAB, Run, write_corpus


def move(run: Run, folder: Path) -> None:
    """Move the corpora of the recipe to `folder`."""
    folder.mkdir()
    sources = [*run.recipe["data"]["train"], *run.recipe["data"]["validation"]]
    for source in sources:
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{source['path']}{suffix}", folder)
        source["path"] = str(folder / Path(source["path"]).name)


def write_mask(prefix: Path, loss: Callable[[int], int]) -> None:
    """A mask for the corpus in which all tokens of document `i` are `loss(i)`."""
    corpus = IndexedDataset(prefix)
    with IndexedDatasetWriter(mask_prefix(str(prefix)), np.uint8) as masks:
        for document in range(corpus.documents):
            masks.add_document(np.full(corpus.document_lengths[document], loss(document)))


def overwrite_tokens(prefix: Path) -> None:
    """Other valid tokens in documents of the same lengths."""
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    ((tokens + 1) % VOCAB).astype(np.uint16).tofile(f"{prefix}.bin")


def test_moved_corpora_go_on_where_they_were(run: Run, finished_run: Run) -> None:
    """Moved in the first stage and again in the second, whose blend goes on where the first one stopped."""
    assert run.train_here("--stop-at-step", "3") == 0
    move(run, run.folder / "second")
    assert run.train_here("--stop-at-step", "8") == 0
    shutil.move(run.folder / "second", run.folder / "third")
    for source in [*run.recipe["data"]["train"], *run.recipe["data"]["validation"]]:
        source["path"] = source["path"].replace("second", "third")
    assert run.train_here() == 0
    assert run.losses() == pytest.approx(finished_run.losses(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda own: overwrite_tokens(own / "two"), "data.train[1].path: corpus {own}/two has changed"),
        (lambda own: overwrite_tokens(own / "valid"), "data.validation[0].path: corpus {own}/valid has changed"),
        (lambda own: write_mask(own / "one", lambda i: i % 2), "the checkpoint was saved: another loss mask"),
    ],
    ids=["training tokens", "validation tokens", "loss mask"],
)
def test_changed_data_are_refused(
    run: Run, change: Callable[[Path], None], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = run.folder / "own"
    move(run, own)
    run.recipe["data"]["long_conversations"] = "split"
    write_mask(own / "one", lambda _document: 1)
    assert run.train_here("--stop-at-step", "2") == 0
    change(own)
    assert run.train_here() == 2
    assert error.format(own=own) in capsys.readouterr().err


def test_another_corpus_in_a_source_is_refused_with_both_paths(
    run: Run, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two sources exchanged: their weights would change hands."""
    assert run.train_here("--stop-at-step", "2") == 0
    one, two = run.recipe["data"]["train"]
    one["path"], two["path"] = two["path"], one["path"]
    assert run.train_here() == 2
    error = capsys.readouterr().err
    assert (
        f"data.train[0].path: given {corpora / 'two'}, which holds another corpus than {corpora / 'one'} did" in error
    )


def test_validation_can_be_added_to_a_run_and_not_exchanged(
    run: Run, corpora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = run.recipe["data"].pop("validation")
    assert run.train_here("--stop-at-step", "2") == 0
    run.recipe["data"]["validation"] = validation
    assert run.train_here("--stop-at-step", "4") == 0
    run.recipe["data"]["validation"] = [{"path": str(corpora / "two")}]
    assert run.train_here() == 2
    assert f"data.validation[0].path: given {corpora / 'two'}" in capsys.readouterr().err


def test_a_path_that_was_trained_on_is_compared_also_after_corpora_that_are_new(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run.folder / "first"
    move(run, first)
    run.recipe["data"]["validation"] = []
    assert run.train_here("--stop-at-step", "2") == 0
    move(run, run.folder / "second")
    overwrite_tokens(first / "one")
    run.recipe["data"]["validation"] = [{"path": str(first / name)} for name in ("valid", "one")]
    assert run.train_here() == 2
    assert f"data.validation[1].path: corpus {first}/one has changed" in capsys.readouterr().err


def test_masks_without_loss_are_refused_before_training(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    own = run.folder / "own"
    move(run, own)
    run.recipe["stages"][1]["train"] = [{"path": str(own / "two")}]
    write_mask(own / "two", lambda _document: 0)
    assert run.train_here() == 2
    assert "stages[1].train: no token carries loss" in capsys.readouterr().err
    assert not run.run_dir.exists()


def test_a_stage_that_reads_no_token_with_loss_ends_with_an_error(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The only document with loss lies beyond what the stage reads. Interrupted, it still knows at its end."""
    corpus = run.folder / "own"
    write_corpus(corpus, 60, seed=0)
    run.recipe["data"] |= {"train": [{"path": str(corpus)}], "long_conversations": "split"}
    config = load_config(run.write_recipe())
    data = training_data(samples_of(config), stages_of(config)[0], {})
    read = {part.document for index in range(data.sequences) for part in data.sample(index).parts}
    unread = next(document for document in range(60) if document not in read)
    write_mask(corpus, lambda document: int(document == unread))
    assert run.train_here("--stop-at-step", "2") == 0
    assert run.train_here() == 2
    assert "stage short: no token of its 6 batches carried loss" in capsys.readouterr().err


def test_a_corpus_smaller_than_a_batch_is_reported_when_its_stage_begins(run: Run) -> None:
    small = run.folder / "small"
    with IndexedDatasetWriter(small, np.uint16) as writer:
        writer.add_document(np.arange(256) % VOCAB)
    run.recipe["data"]["train"] = [{"path": str(small)}]
    assert run.train_here("--stop-at-step", "1") == 0
    (warning,) = run.records("warning")
    assert warning["step"] == 0
    assert "256 tokens, fewer than a batch (512): the stage reads it about 12.0 times" in warning["message"]


def test_a_stage_that_does_not_fit_the_gpu_is_a_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moba_train.run.reports.shortage", lambda *_: "stage only needs about 99.0 GiB")
    assert run.train_here("--stop-at-step", "1") == 0
    (warning,) = run.records("warning")
    assert warning["message"] == "stage only needs about 99.0 GiB; `moba-train plan` names changes that fit"


def test_long_conversations_are_reported_when_their_stage_begins(run: Run) -> None:
    own = run.folder / "own"
    move(run, own)
    run.recipe["data"] |= {"long_conversations": "truncate", "packing": "best_fit"}
    write_mask(own / "one", lambda _document: 1)
    assert run.train_here("--stop-at-step", "1") == 0
    (warning,) = [record["message"] for record in run.records("warning") if "conversations" in record["message"]]
    assert "of own/one are longer than the 64 tokens of a sample" in warning.replace(f"{run.folder}/", "")
