"""Marks are about one save of a step, survive a restart, and come from a file that may hold anything."""

import json
import os
from pathlib import Path

import pytest

from moba_train.checkpoint import retention
from moba_train.checkpoint.manifest import META, hash_file, write_json
from moba_train.checkpoint.publish import make_temporary_folder, publish, published
from moba_train.checkpoint.retention import MARKS, Marks, Retention


def meta(step: int, save_id: str = "") -> dict[str, object]:
    return {"progress": {"step": step}, "good": True} | ({"save_id": save_id} if save_id else {})


def test_a_mark_is_about_one_save_and_lasts(tmp_path: Path) -> None:
    marks = Marks.read(tmp_path)
    assert marks.add(8, "a-8", "step 9: loss nan")
    assert not marks.add(8, "a-8", "again")
    assert marks.add(4, "", "an older version saved it")
    marks.write(tmp_path)
    read = Marks.read(tmp_path)
    assert read.reason(meta(8, "a-8")) == "step 9: loss nan"
    assert read.reason(meta(8, "b-8")) is None, "trained and saved again"
    assert read.reason(meta(4)) == "an older version saved it"
    assert read.steps == [4, 8]
    accept = read.accept(lambda found: found["progress"]["step"] < 10)
    assert [accept(each) for each in (meta(8, "a-8"), meta(9), meta(10))] == [False, True, False]
    read.remove(8, "a-8")
    assert read.steps == [4]


def test_the_newest_marks_are_kept_and_long_reasons_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks([])
    for step in range(1, 6):
        marks.add(step, f"a-{step}", "r" * 100_000)
    monkeypatch.setattr(retention, "_MOST_MARKS", 4)
    marks.write(tmp_path)
    assert (tmp_path / MARKS).stat().st_size < 4 * 1000
    read = Marks.read(tmp_path)
    assert read.steps == [2, 3, 4, 5]
    assert "rrr" in (read.reason(meta(5, "a-5")) or "")
    monkeypatch.setattr(retention, "_MOST_MARKS", 2)
    assert Marks.read(tmp_path).steps == [4, 5]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"[]",
        b'{"starts": []}',
        3,
        [{"step": 8, "save_id": "a", "reason": "r"}, {"step": 8}, 5, None],
        b'{"marks": ' + b"[" * 100_000,
        b" " * (retention.SMALL_FILE_BYTES + 1),
    ],
    ids=["no text", "a list", "another one", "no list", "no marks", "deep", "large"],
)
def test_a_file_that_cannot_be_used_marks_nothing(
    tmp_path: Path, content: object, caplog: pytest.LogCaptureFixture
) -> None:
    if not isinstance(content, bytes):
        content = json.dumps({"sha256": retention._sha256(content), "marks": content}).encode()
    (tmp_path / MARKS).write_bytes(content)
    assert Marks.read(tmp_path).steps == []
    assert caplog.text.count("marks.json is ignored") == 1


def test_neither_a_link_nor_a_fifo_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marks = [{"step": 8, "save_id": "", "reason": "r"}]
    (tmp_path / "elsewhere").write_text(json.dumps({"sha256": retention._sha256(marks), "marks": marks}))
    (tmp_path / MARKS).symlink_to(tmp_path / "elsewhere")
    assert Marks.read(tmp_path).steps == []
    (tmp_path / MARKS).unlink()
    os.mkfifo(tmp_path / MARKS)
    assert Marks.read(tmp_path).steps == []
    assert caplog.text.count("is ignored") == 2


def save(folder: Path, step: int, **more: object) -> None:
    temporary = make_temporary_folder(folder, step)
    write_json(temporary / META, meta(step, f"a-{step}") | more)
    publish(temporary, step, {META: hash_file(temporary / META)})


def test_retention_keeps_the_newest_that_are_not_marked(tmp_path: Path) -> None:
    """Step 12 and 16 are known to be broken. They are not what `keep_last` and `protect` are for."""
    marks = Marks([])
    marks.add(12, "a-12", "r")
    marks.add(16, "a-16", "r")
    for step in (4, 8, 12, 16):
        save(tmp_path, step)
    marks.write(tmp_path)
    Retention(keep_last=1).apply(tmp_path)
    assert [step for step, _ in published(tmp_path)] == [8, 12, 16], "newer ones stay until training has come past them"
    save(tmp_path, 20)
    Retention(keep_last=1).apply(tmp_path)
    assert [step for step, _ in published(tmp_path)] == [20]


def test_a_marked_checkpoint_takes_no_place_among_the_last(tmp_path: Path) -> None:
    marks = Marks([])
    marks.add(12, "a-12", "r")
    for step in (4, 8, 12, 16):
        save(tmp_path, step)
    marks.write(tmp_path)
    Retention(keep_last=2).apply(tmp_path)
    assert [step for step, _ in published(tmp_path)] == [8, 16]


def test_a_marked_checkpoint_is_not_the_good_one_to_keep(tmp_path: Path) -> None:
    """Step 8 is the newest that the run could go back to: step 12 is marked, step 16 came with a spike."""
    marks = Marks([])
    marks.add(12, "a-12", "r")
    for step in (4, 8, 12, 16):
        save(tmp_path, step, good=step < 16)
    marks.write(tmp_path)
    Retention(keep_last=1).apply(tmp_path)
    assert [step for step, _ in published(tmp_path)] == [8, 16]


def test_retention_removes_nothing_where_all_are_marked(tmp_path: Path) -> None:
    marks = Marks([])
    for step in (4, 8, 12):
        save(tmp_path, step)
        marks.add(step, f"a-{step}", "r")
    marks.write(tmp_path)
    Retention(keep_last=1).apply(tmp_path)
    assert [step for step, _ in published(tmp_path)] == [4, 8, 12]


def test_a_marked_checkpoint_is_not_the_best(tmp_path: Path) -> None:
    marks = Marks([])
    marks.add(8, "a-8", "r")
    for step, loss in ((4, 2.5), (8, 2.0), (12, 3.0), (16, 3.5)):
        save(tmp_path, step, stage="only", eval_loss=loss)
    marks.write(tmp_path)
    Retention(keep_last=1, keep_best=1).apply(tmp_path)
    assert [step for step, _ in published(tmp_path)] == [4, 16]


def test_marks_of_the_run_count_in_its_fallback_folder_too(tmp_path: Path) -> None:
    run, fallback = tmp_path / "run", tmp_path / "fallback"
    run.mkdir()
    marks = Marks([])
    marks.add(12, "a-12", "r")
    marks.write(run)
    for step in (8, 12):
        save(fallback, step)
    Retention(keep_last=1).apply(fallback, marked_in=run)
    assert [step for step, _ in published(fallback)] == [8, 12]
