"""`evaluations.json`: what evaluations found at checkpoints that were saved before them."""

import json
from pathlib import Path

import pytest

from moba_train.checkpoint import retention
from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.manifest import step_name
from moba_train.checkpoint.retention import EVALUATIONS, Evaluated


def meta(step: int, save_id: str = "a-1") -> dict[str, object]:
    return {"progress": {"step": step}, "save_id": save_id}


def test_numbers_are_found_by_step_and_save_and_leave_with_their_checkpoint(tmp_path: Path) -> None:
    (tmp_path / step_name(2)).mkdir()
    evaluated = Evaluated({})
    for step in (1, 2, 3):  # 1 is no longer there, 3 is being saved
        evaluated.add(step, "a-1", {"eval_loss": float(step)})
    evaluated.write(tmp_path)
    read = Evaluated.read(tmp_path)
    assert [read.numbers(meta(step)) for step in (1, 2, 3)] == [None, {"eval_loss": 2.0}, {"eval_loss": 3.0}]
    assert read.numbers(meta(2, "b-2")) is None, "a later checkpoint of this step"
    assert read.numbers({}) is None


def test_the_numbers_of_the_newest_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def known() -> list[int]:
        read = Evaluated.read(tmp_path)
        return [step for step in range(1, 6) if read.numbers(meta(step)) is not None]

    evaluated = Evaluated({})
    for step in range(1, 6):
        (tmp_path / step_name(step)).mkdir()
        evaluated.add(step, "a-1", {"eval_loss": 1.0})
    monkeypatch.setattr(retention, "_MOST_EVALUATED", 4)
    evaluated.write(tmp_path)
    assert known() == [2, 3, 4, 5]
    monkeypatch.setattr(retention, "_MOST_EVALUATED", 2)
    assert known() == [4, 5]


def test_numbers_are_written_though_the_folder_cannot_be_listed_this_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_folder: Path) -> list[tuple[int, Path]]:
        raise UnreadableError("Input/output error")

    evaluated = Evaluated({})
    for step in (1, 2):
        evaluated.add(step, "a-1", {"eval_loss": float(step)})
    monkeypatch.setattr(retention, "published", unreadable)
    evaluated.write(tmp_path)
    read = Evaluated.read(tmp_path)
    assert [read.numbers(meta(step)) for step in (1, 2)] == [{"eval_loss": 1.0}, {"eval_loss": 2.0}]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"evaluations": 3}',
        '{"evaluations": [{"step": 2}]}',
        json.dumps({"evaluations": [{"step": 2, "save_id": "a-1", "numbers": {"eval_loss": "low"}}]}),
    ],
)
def test_a_damaged_file_counts_as_missing(tmp_path: Path, content: str) -> None:
    (tmp_path / EVALUATIONS).write_text(content)
    assert Evaluated.read(tmp_path).numbers(meta(2)) is None
