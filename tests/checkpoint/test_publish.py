"""Published checkpoints: found, verified, kept and removed as promised. No tensors needed."""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moba_train.checkpoint import manifest, publish
from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.retention import Retention
from moba_train.errors import CheckpointError
from moba_train.output_files import temporary_path


def publish_step(folder: Path, step: int, content: str = "weights", **meta: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = publish.make_temporary_folder(folder, step)
    (temporary / "rank_0_0.safetensors").write_text(f"{content} of step {step}")
    manifest.write_json(temporary / manifest.META, {"step": step, **meta})
    return publish.publish(temporary, step, {path.name: manifest.hash_file(path) for path in temporary.iterdir()})


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def test_published_checkpoint_is_found_verified_and_read(tmp_path: Path) -> None:
    publish_step(tmp_path, 100)
    path = publish_step(tmp_path, 200)

    assert publish.latest_checkpoint(tmp_path) == path == tmp_path / "step_00000200"
    assert (tmp_path / "latest").read_text() == "step_00000200\n"
    manifest.verify_checkpoint(path)
    assert manifest.read_meta(path) == {"step": 200}
    assert json.loads((path / "manifest.json").read_text())["step"] == 200


def test_all_is_on_disk_before_the_rename_that_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut could leave a name without what it stands for, in place of the checkpoint that was there."""
    done: list[str] = []
    fsync = os.fsync
    rename = Path.rename
    replace = Path.replace

    def noted_fsync(descriptor: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def noted_move(move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def moved(source: Path, target: Path) -> Path:
            done.append(f"{source.name} -> {target.name}")
            return move(source, target)

        return moved

    folder = tmp_path / "checkpoints"
    publish_step(folder, 100)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_move(rename))
    monkeypatch.setattr(Path, "replace", noted_move(replace))
    publish_step(folder, 100)
    temporary = done[-5].removesuffix(" -> step_00000100")
    assert temporary.startswith(".tmp-step_00000100-")
    latest = done[-2].removesuffix(" -> latest")
    assert done == [
        "fsync meta.json",
        "fsync manifest.json",
        f"fsync {temporary}",
        "step_00000100 -> .replaced-step_00000100",
        f"{temporary} -> step_00000100",
        "fsync checkpoints",
        f"fsync {latest}",
        f"{latest} -> latest",
        "fsync checkpoints",
    ]


def test_of_equal_steps_the_one_in_the_earlier_folder_comes_first(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    paths = [publish_step(folder, step) for folder, step in ((first, 100), (second, 100), (second, 99))]
    assert publish.newest_first(first, second) == paths
    assert publish.newest_first(second, first) == [paths[1], paths[0], paths[2]]


def test_steps_of_more_than_eight_digits_are_newer(tmp_path: Path) -> None:
    publish_step(tmp_path, 99_999_999)
    path = publish_step(tmp_path, 100_000_000)
    assert publish.latest_checkpoint(tmp_path) == path


def test_no_checkpoint(tmp_path: Path) -> None:
    assert publish.latest_checkpoint(tmp_path) is None
    assert publish.latest_checkpoint(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match=r"absent: there is no such folder$"):
        publish.find_checkpoint(tmp_path / "absent")


def test_what_is_no_checkpoint_is_told_with_those_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that retention has removed, and the folder of all."""
    monkeypatch.chdir(tmp_path)
    for step in (100, 200):
        publish_step(Path("checkpoints"), step)
    has = "; checkpoints has the checkpoints of steps 100, 200"
    for path, problem in (
        ("checkpoints/step_00000050", f"there is no such folder (from {tmp_path}){has}"),
        ("checkpoints", f"neither a checkpoint nor a run folder with a valid one in checkpoints/checkpoints{has}"),
    ):
        with pytest.raises(CheckpointError) as caught:
            publish.find_checkpoint(Path(path))
        assert str(caught.value) == f"{path}: {problem}"
    Path("checkpoints").rename("run-3f2a9c01")  # as below a fallback_dir
    with pytest.raises(CheckpointError, match="; run-3f2a9c01 has the checkpoints of steps 100, 200"):
        publish.find_checkpoint(Path("run-3f2a9c01"))
    with pytest.raises(CheckpointError, match=r"^\.: neither a checkpoint nor a run folder"):
        publish.find_checkpoint(Path("."))


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def failing_reads(patch: pytest.MonkeyPatch, name: str, times: int = 1_000, error: int = errno.EIO) -> list[str]:
    """Makes the next `times` attempts to open or look at a path that ends in `name` fail; those that did are returned
    as they happen."""
    failed: list[str] = []

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).endswith(name) and len(failed) < times:
                failed.append(str(path))
                raise OSError(error, os.strerror(error), str(path))
            return function(path, *args, **kwargs)

        return attempt

    patch.setattr(os, "open", failing(os.open))
    patch.setattr(Path, "open", failing(Path.open))
    patch.setattr(Path, "lstat", failing(Path.lstat))
    return failed


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ENOENT, errno.EACCES])
@pytest.mark.parametrize("name", ["manifest.json", "meta.json", "rank_0_0.safetensors"])
def test_a_read_that_fails_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: int
) -> None:
    path = publish_step(tmp_path, 100)
    with monkeypatch.context() as patch:
        failed = failing_reads(patch, name, 2, error)
        manifest.verify_checkpoint(path)
        assert manifest.read_meta(path) == {"step": 100}
        assert len(failed) == 2
        failing_reads(patch, name, error=error)
        with pytest.raises(CheckpointError, match=rf"{name}.*could not be read|could not be read.*{name}") as refusal:
            manifest.verify_checkpoint(path)
        assert "not known to be damaged" in str(refusal.value)


def test_a_file_that_can_be_looked_at_but_not_read_does_not_count_as_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish_step(tmp_path, 100)
    lstat = Path.lstat
    failing_reads(monkeypatch, "rank_0_0.safetensors")
    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(UnreadableError, match=r"rank_0_0\.safetensors: .*Input/output error"):
        manifest.verify_checkpoint(path)


def test_damage_outweighs_what_could_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish_step(tmp_path, 100)
    flip_byte(path / "meta.json")
    failing_reads(monkeypatch, "rank_0_0.safetensors")
    with pytest.raises(CheckpointError, match=r"is damaged: meta\.json: its SHA.*rank_0_0.*Input/output error"):
        manifest.verify_checkpoint(path)


def test_a_checkpoint_that_a_killed_process_was_replacing_is_named(tmp_path: Path) -> None:
    path = publish_step(tmp_path / "checkpoints", 100)
    path.rename(path.with_name(".replaced-step_00000100"))
    for asked in (tmp_path, path):
        with pytest.raises(CheckpointError, match="killed as it replaced step_00000100: run its command again"):
            publish.find_checkpoint(asked)


def test_a_checkpoint_that_goes_before_it_is_held_is_not_the_one_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = publish_step(tmp_path / "checkpoints", 100)
    hold = publish.hold

    def held_late(path: Path) -> Any:
        if path == older:
            publish_step(tmp_path / "checkpoints", 200)
            publish.retire(older)
        return hold(path)

    monkeypatch.setattr(publish, "hold", held_late)
    found, held = publish.find_checkpoint(tmp_path)
    assert found.name == "step_00000200"
    publish.retire(found)
    assert found.exists()
    assert held is not None
    held.close()
    publish.retire(found)
    assert not found.exists()


def test_the_newest_one_is_not_replaced_by_an_older_one_because_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = publish_step(tmp_path, 100)
    newer = publish_step(tmp_path, 200)
    with monkeypatch.context() as patch:
        failing_reads(patch, "step_00000200/manifest.json")
        with pytest.raises(CheckpointError, match=r"step_00000200/manifest\.json could not be read"):
            publish.latest_checkpoint(tmp_path)
    listing = publish.published(tmp_path)
    newer_is_gone = iter([listing])
    monkeypatch.setattr(publish, "published", lambda _: next(newer_is_gone, listing[:1]))
    publish.remove(newer)
    assert publish.latest_checkpoint(tmp_path) == older, "a run in progress has removed it"


@pytest.mark.parametrize(
    ("file", "damage", "found_by_size"),
    [
        ("rank_0_0.safetensors", flip_byte, False),
        ("rank_0_0.safetensors", cut_in_half, True),
        ("rank_0_0.safetensors", Path.unlink, True),
        ("meta.json", Path.unlink, True),
        ("manifest.json", cut_in_half, True),
        ("manifest.json", Path.unlink, True),
    ],
)
def test_damage_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Callable[..., Any], found_by_size: bool
) -> None:
    older = publish_step(tmp_path, 100)
    newer = publish_step(tmp_path, 200)
    damage(newer / file)

    with pytest.raises(CheckpointError, match=file):
        manifest.verify_checkpoint(newer)
    with caplog.at_level(logging.WARNING):
        assert publish.latest_checkpoint(tmp_path) == (older if found_by_size else newer)
    assert (file in caplog.text) == found_by_size


def test_verify_lists_every_problem(tmp_path: Path) -> None:
    path = publish_step(tmp_path, 100)
    flip_byte(path / "rank_0_0.safetensors")
    (path / "meta.json").unlink()

    with pytest.raises(CheckpointError) as error:
        manifest.verify_checkpoint(path)
    for file in ("rank_0_0.safetensors", "meta.json: missing"):
        assert file in str(error.value)


def test_files_that_the_manifest_does_not_name_do_not_count(tmp_path: Path) -> None:
    """What file browsers and network file systems leave behind."""
    path = publish_step(tmp_path, 100)
    for name in (".DS_Store", ".nfs000000000012", "._meta.json"):
        (path / name).write_text("of another program")
    assert not {".DS_Store", "._meta.json", ".nfs000000000012"} & manifest.verify_checkpoint(path).keys()


def test_another_format_is_refused_by_version(tmp_path: Path) -> None:
    path = publish_step(tmp_path, 100)
    newer = json.loads((path / "manifest.json").read_text()) | {"format_version": 99}
    (path / "manifest.json").write_text(json.dumps(newer))
    with pytest.raises(CheckpointError, match="format_version is 99"):
        manifest.verify_checkpoint(path)


def test_retention_keeps_the_newest_and_the_multiples(tmp_path: Path) -> None:
    for step in range(10, 110, 10):
        publish_step(tmp_path, step)
    Retention(2, keep_every=30).apply(tmp_path)
    assert steps(tmp_path) == [30, 60, 90, 100]
    Retention(1).apply(tmp_path)
    assert steps(tmp_path) == [100]


def test_retention_keeps_the_best_of_each_stage(tmp_path: Path) -> None:
    """Losses of sequences of another length are no competition; a loss that is not a number or not there never wins."""
    losses = {10: 3.0, 20: 2.5, 30: 2.9, 40: float("nan"), 50: 2.8, 60: 2.7, 70: 2.7, 80: 2.75}
    for step, loss in losses.items():
        publish_step(tmp_path, step, stage="short" if step < 50 else "long", eval_loss=loss)
    publish_step(tmp_path, 90)
    Retention(1, keep_best=1).apply(tmp_path)
    assert steps(tmp_path) == [20, 70, 90]


def test_retention_never_removes_the_newest_good_one(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        publish_step(tmp_path, step, good=step <= 20)
        Retention(1).apply(tmp_path)
    assert steps(tmp_path) == [20, 50]
    assert publish.latest_checkpoint(tmp_path) == tmp_path / "step_00000050"
    assert publish.latest_checkpoint(tmp_path, accept=publish.is_good) == tmp_path / "step_00000020"
    assert publish.latest_checkpoint(tmp_path, accept=lambda meta: meta["step"] < 20) is None
    publish_step(tmp_path, 60)  # good unless it says otherwise
    Retention(1).apply(tmp_path, protect=lambda meta: meta["step"] < 50)
    assert steps(tmp_path) == [20, 60]


def test_retention_passes_over_a_damaged_meta_and_names_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 20 is the newest good one, until a byte of its meta changes: then step 10 is, and must stay."""
    for step in (10, 20):
        publish_step(tmp_path, step, good=True)
    flip_byte(tmp_path / "step_00000020" / "meta.json")
    retention = Retention(1, keep_every=20)
    for step in (30, 40):
        publish_step(tmp_path, step, good=False)
        retention.apply(tmp_path)
    assert steps(tmp_path) == [10, 20, 40]
    assert caplog.text.count("step_00000020 is damaged: meta.json: its SHA-256") == 1


def test_damaged_checkpoints_take_no_place_of_sound_ones(tmp_path: Path) -> None:
    """Steps 40 and 50 are damaged: two sound ones stay besides, and damaged ones as long as an older one does."""
    for step in (10, 20, 30, 40, 50):
        publish_step(tmp_path, step)
    for step in (40, 50):
        flip_byte(tmp_path / f"step_{step:08}" / "meta.json")
    Retention(2).apply(tmp_path)
    assert steps(tmp_path) == [20, 30, 40, 50]
    publish_step(tmp_path, 60)
    Retention(2).apply(tmp_path)
    assert steps(tmp_path) == [30, 40, 50, 60]
    publish_step(tmp_path, 70)
    Retention(2).apply(tmp_path)
    assert steps(tmp_path) == [60, 70]


def test_retention_keeps_what_it_could_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20, 30):
        publish_step(tmp_path, step)
    with monkeypatch.context() as patch:
        failing_reads(patch, "step_00000010/meta.json")
        Retention(1).apply(tmp_path)
    assert steps(tmp_path) == [10, 30]
    Retention(1).apply(tmp_path)
    assert steps(tmp_path) == [30]


def test_what_is_set_aside_is_neither_found_nor_counted(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        publish_step(tmp_path, step)
    publish.set_aside(tmp_path / "step_00000300")
    assert publish.latest_checkpoint(tmp_path) == tmp_path / "step_00000200"
    Retention(1).apply(tmp_path)
    publish.clean_up(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["set-aside-step_00000300", "step_00000200"]


def test_a_step_can_be_set_aside_again(tmp_path: Path) -> None:
    """The run trained the step anew and saved it, and that checkpoint is damaged, too."""
    for content in ("first weights", "second weights"):
        aside = publish.set_aside(publish_step(tmp_path, 100, content))
    assert (aside / "rank_0_0.safetensors").read_text() == "second weights of step 100"
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["set-aside-step_00000100"]


def test_retention_keeps_what_latest_names(tmp_path: Path) -> None:
    """After falling back from a damaged step 200, a new step 150 is the one to go on from."""
    publish_step(tmp_path, 200)
    publish_step(tmp_path, 150)
    Retention(1).apply(tmp_path)
    assert steps(tmp_path) == [150, 200]


def test_retention_goes_on_where_latest_is_no_text(tmp_path: Path) -> None:
    for step in (100, 200):
        publish_step(tmp_path, step)
    (tmp_path / publish.LATEST).write_bytes(b"\xff\xfe")
    Retention(1).apply(tmp_path)
    assert steps(tmp_path) == [200]


def test_a_step_can_be_published_again(tmp_path: Path) -> None:
    publish_step(tmp_path, 100, "old weights")
    path = publish_step(tmp_path, 100, "new weights")
    assert (path / "rank_0_0.safetensors").read_text() == "new weights of step 100"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000100"]


def test_a_checkpoint_counts_although_its_name_cannot_be_written_into_latest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    publish_step(tmp_path, 100)
    monkeypatch.setattr(publish, "write_atomically", full)
    path = publish_step(tmp_path, 200)
    assert publish.latest_checkpoint(tmp_path) == path
    assert "latest still names another one: [Errno 28] No space" in caplog.text


def test_clean_up_after_a_kill(tmp_path: Path) -> None:
    """Killed half way through a save, and in the middle of publishing a step again."""
    publish_step(tmp_path, 100)
    publish.make_temporary_folder(tmp_path, 200)
    temporary_path(tmp_path / "latest").write_text("step_0")
    (tmp_path / "step_00000100").rename(tmp_path / ".replaced-step_00000100")

    publish.clean_up(tmp_path)

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_00000100"]
    manifest.verify_checkpoint(tmp_path / "step_00000100")


def test_a_file_that_rank_0_cannot_see_is_not_published(tmp_path: Path) -> None:
    temporary = publish.make_temporary_folder(tmp_path, 100)
    with pytest.raises(CheckpointError, match=r"rank_1_0\.safetensors: missing.*shared?"):
        publish.publish(temporary, 100, {"rank_1_0.safetensors": {"size": 8, "sha256": "0"}})
    assert publish.latest_checkpoint(tmp_path) is None
