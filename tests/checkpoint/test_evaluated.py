"""`evaluations.json`: what evaluations found at checkpoints that were saved before them."""

import json
import math
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
    "entries", [3, [{"step": 2}], [{"step": 2, "save_id": "a-1", "numbers": {"eval_loss": "low"}}]]
)
def test_a_forged_file_counts_as_missing(tmp_path: Path, entries: object) -> None:
    content = {"sha256": retention._sha256(entries), "evaluations": entries}
    (tmp_path / EVALUATIONS).write_text(json.dumps(content))
    assert Evaluated.read(tmp_path).numbers(meta(2)) is None


def test_one_changed_byte_anywhere_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One digit of a loss could end a stage (by its `until`), or choose the checkpoint that is the best."""
    evaluated = Evaluated({})
    evaluated.add(2, "a-1", {"eval_loss": 2.1915, "not_finite": math.inf})
    evaluated.write(tmp_path)
    path = tmp_path / EVALUATIONS
    content = path.read_bytes()
    assert Evaluated.read(tmp_path).numbers(meta(2)) == {"eval_loss": 2.1915, "not_finite": math.inf}
    noticed = 0
    for position, byte in enumerate(content):
        path.write_bytes(content[:position] + bytes([byte ^ 1]) + content[position + 1 :])
        numbers = Evaluated.read(tmp_path).numbers(meta(2))
        assert numbers in (None, {"eval_loss": 2.1915, "not_finite": math.inf})
        noticed += numbers is None
    assert noticed > 0.9 * len(content)  # one space instead of a line break changes nothing
    path.write_bytes(content.replace(b"2.1915", b"0.1915"))
    assert Evaluated.read(tmp_path).numbers(meta(2)) is None
    assert "evaluations.json is ignored: its content does not have its sha256" in caplog.text
