"""Passes over a corpus, and what a resumed run reads of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.data.batch import Batch
from moba_train.run.learner import Learner
from moba_train.run.step import StepLosses
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks

PASS_STEPS = 4
"""Steps that read the corpus once."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """32 documents of 16 tokens, each of which shows its document."""
    prefix = tmp_path_factory.mktemp("corpus") / "numbered"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in range(32):
            writer.add_document(np.full(16, document))
    return str(prefix)


def run_of_passes(folder: Path, corpus: str) -> Run:
    """Three passes in steps of 8 documents; the first stage ends with the second pass."""
    folder.mkdir(exist_ok=True)
    run = Run(folder, folder)
    # Its groups of shuffled samples end with a pass; those of `concat` may hold several passes of a small corpus.
    run.recipe["data"] = {"train": [{"path": corpus}], "packing": "best_fit"}
    run.recipe |= {"batch_tokens": 128, "checkpoint": {"every": 100}}
    del run.recipe["evaluation"]
    stage = {"seq_len": 16, "micro_batch_size": 2}
    run.recipe["stages"] = [
        {"name": "two", "tokens": 2 * PASS_STEPS * 128, **stage},
        {"name": "third", "tokens": PASS_STEPS * 128, **stage},
    ]
    return run


@contextmanager
def documents_read() -> Iterator[list[list[int]]]:
    """The documents of every step that is trained inside."""
    steps: list[list[int]] = []
    accumulate = Learner.accumulate

    def noted(self: Learner, batches: Sequence[Batch], loss_weight: float, step: int) -> StepLosses:
        steps.append([int(batch.tokens[at]) for batch in batches for at in batch.layout.edges[:-1]])
        return accumulate(self, batches, loss_weight, step)

    with patch.object(Learner, "accumulate", noted):
        yield steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> tuple[Run, list[list[int]]]:
    """A run of three passes, and the documents of its steps. Not to be changed."""
    run = run_of_passes(tmp_path_factory.mktemp("undisturbed"), corpus)
    with documents_read() as steps:
        assert run.train_here() == 0
    return run, steps


def test_each_pass_has_every_document_once_in_an_order_of_its_own(undisturbed: tuple[Run, list[list[int]]]) -> None:
    passes = np.array(undisturbed[1]).reshape(-1, 32).tolist()
    assert len(passes) == 3
    assert all(sorted(documents) == list(range(32)) for documents in passes)
    assert len({tuple(documents) for documents in passes}) == 3


@pytest.mark.parametrize(
    "stops",
    [[PASS_STEPS], [2 * PASS_STEPS], [PASS_STEPS + 2], [PASS_STEPS - 1, PASS_STEPS + 1]],
    ids=["the last step of a pass", "of a pass and a stage", "inside the second pass", "around the end of a pass"],
)
def test_a_run_that_is_resumed_reads_what_it_would_have_read(
    stops: list[int], tmp_path: Path, corpus: str, undisturbed: tuple[Run, list[list[int]]]
) -> None:
    """verl#7401: a run that stopped at the end of an epoch skips the next one, with exit code 0.
    accelerate PR#4071: a run that is resumed in its second epoch reads it in the order of the first."""
    other, wanted = undisturbed
    run = run_of_passes(tmp_path, corpus)
    with documents_read() as read:
        for stop in stops:
            assert run.train_here("--stop-at-step", str(stop)) == 0
        assert run.train_here() == 0
    assert read == wanted
    assert run.losses() == other.losses()
    assert_same_tensors(run.newest_checkpoint, other.newest_checkpoint)


def test_resuming_is_exact_on_four_ranks_and_reads_the_same_on_two(tmp_path: Path, corpus: str, ranks: Ranks) -> None:
    """prime-rl PR#1035: a resumed run is exact on one rank and not on two. Two ranks: tests/run/test_resume.py."""

    def two_passes(name: str) -> Run:
        run = run_of_passes(tmp_path / name, corpus)
        run.recipe["stages"] = run.recipe["stages"][:1]
        return run

    undisturbed, run, fewer = map(two_passes, ("undisturbed", "resumed", "fewer"))
    ranks.train(undisturbed, 4)
    ranks.train(run, 4, "--stop-at-step", str(PASS_STEPS + 1))
    fewer.take_over(run, PASS_STEPS + 1)
    ranks.train(run, 4)
    assert run.losses() == undisturbed.losses()
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)
    ranks.train(fewer, 2)
    assert fewer.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)


def test_ranks_that_share_sequences_report_the_tokens_and_passes_of_one(
    tmp_path: Path, corpus: str, ranks: Ranks
) -> None:
    """axolotl PR#3498, #3218: sequences are cut once more by the data loader; epochs are counted per rank."""
    told = []
    for cp in (1, 2):
        run = run_of_passes(tmp_path / f"cp {cp}", corpus)
        run.recipe["stages"] = run.recipe["stages"][:1]
        run.recipe["parallel"] = {"cp": cp}
        ranks.train(run, 2)
        keys = ("step", "tokens", "loss_tokens")
        told.append([[record[key] for key in keys] for record in run.records()])
    assert told[0] == told[1] == [[step, 128 * step, 120] for step in range(1, 2 * PASS_STEPS + 1)]


def test_validation_loss_does_not_depend_on_accumulation(run: Run) -> None:
    """torchtitan#1759: the validation loss is divided by the number of accumulated micro-batches."""
    losses = []
    stage = run.recipe["stages"][1] | {"tokens": 1024}
    for accumulated in (1, 8):
        run.recipe["run_dir"] = str(run.folder / f"accumulated {accumulated}")
        stage["micro_batch_size"] = 8 // accumulated
        run.recipe |= {"batch_tokens": 1024, "stages": [stage]}
        run.recipe["evaluation"] = {"every": 1, "sequences": 8}
        assert run.train_here() == 0
        losses.append(run.records("validation_loss")[-1]["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
