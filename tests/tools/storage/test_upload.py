"""Copies of checkpoints in an object store: complete or not there, and bit for bit what a run resumes from."""

import json
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest

from moba_train.checkpoint.manifest import read_meta, verify_checkpoint
from moba_train.checkpoint.retention import MARKS, Marks
from moba_train.errors import UserError
from moba_train.foreign_files import local_path
from moba_train.resolve.run import RunFolders
from moba_train.tools.storage import fetch, upload
from moba_train.tools.storage.fetch import METRICS, ResumeFrom, ResumeFromOptions
from moba_train.tools.storage.remote import RemoteFolder, StorageError, complete_steps
from moba_train.tools.storage.upload import Upload, UploadOptions
from tests.checkpoint.test_publish import publish_step, steps
from tests.run.tiny_run import Run, assert_same_tensors
from tests.tools.storage.server import BUCKET, Line

WEIGHTS = "rank_0_0.safetensors"


def folders(path: Path) -> RunFolders:
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    return RunFolders(path, (path / "checkpoints",))


def start(path: Path, address: str, **options: int) -> Upload:
    """An upload that has fetched what there was."""
    opened = Upload(UploadOptions(address=address, **options), folders(path))
    wait(opened)
    return opened


def wait(uploads: Upload) -> list[tuple[str, bool]]:
    """The news once all has ended."""
    assert uploads.is_idle(60)
    return uploads.news()


def save(path: Path, step: int, run_id: str = "one", content: str = "weights", **meta: object) -> Path:
    progress = {"run_id": run_id, "step": step}
    return publish_step(path / "checkpoints", step, content, progress=progress, save_id=f"{run_id}-{step}", **meta)


def address_of(tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


def there(address: str) -> list[int]:
    """Steps of the complete copies."""
    return sorted(complete_steps(RemoteFolder(address).files()))


def test_a_run_on_a_new_disk_goes_on_from_the_newest_copy_bitwise(
    run: Run, tmp_path: Path, corpora: Path, line: Line
) -> None:
    """And neither its files, nor what it prints, nor the copies hold the credentials."""
    address = address_of(tmp_path)
    run.recipe["checkpoint"] |= {"upload": {"address": address, "keep_last": 1}}
    first = run.start(1, "--stop-at-step", "8")
    output, _ = first.communicate(120)
    assert first.returncode == 0, output
    assert there(address) == [8]
    kept = run.run_dir.rename(tmp_path / "kept")

    (tmp_path / "new").mkdir()
    moved = Run(tmp_path / "new", corpora)
    moved.recipe["checkpoint"] = run.recipe["checkpoint"]
    assert moved.train_here() == 0
    shutil.copytree(kept, run.run_dir)
    run.recipe["checkpoint"]["upload"] = None
    assert run.train_here() == 0
    assert_same_tensors(moved.newest_checkpoint, run.newest_checkpoint)
    assert moved.losses() == run.losses(), "the metrics came with the checkpoint"
    texts = [record["message"] for record in moved.records("checkpoint")]
    assert f"the checkpoint of step 8 was fetched from {address}" in texts
    assert any(text.startswith(f"the checkpoint of step 12 is uploaded to {address}: ") for text in texts)
    assert there(address) == [12]

    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    remote = RemoteFolder(address)
    contents = [path.read_bytes() for path in written] + [remote.read(name, 1 << 30) or b"" for name in remote.files()]
    assert len(written) > 20
    assert output in {path.read_text() for path in written if path.name == "output"}
    for secret in line.secrets:
        assert not any(secret.encode() in content for content in contents)


def test_a_new_run_resumes_from_the_copy_of_another_bitwise(run: Run, tmp_path: Path, corpora: Path) -> None:
    """From one of its uploads or of its folder; its own uploads, once there are any, come first."""
    uploads = f"file://{tmp_path}/store"
    run.recipe["checkpoint"] |= {"upload": uploads, "every": 4, "keep_every": 4}
    assert run.train_here() == 0
    (tmp_path / "branch").mkdir()
    branch = Run(tmp_path / "branch", corpora)
    own = f"file://{tmp_path}/own"
    branch.recipe["checkpoint"] |= {"upload": own, "resume_from": f"file://{run.run_dir}/checkpoints/step_00000004"}
    assert branch.train_here() == 0
    assert [record["step"] for record in branch.records("resume")] == [4]
    assert_same_tensors(branch.newest_checkpoint, run.newest_checkpoint)
    assert branch.losses() == run.losses(), "the metrics came with the checkpoint"
    ids = [read_meta(path)["progress"]["run_id"] for path in (run.newest_checkpoint, branch.newest_checkpoint)]
    assert ids[0] != ids[1], "else wandb would show both as one run, and each could upload into the other's copies"
    shutil.rmtree(branch.run_dir)
    assert branch.train_here() == 0
    assert [record["step"] for record in branch.records("resume")][-1] == 12, "its own copy"
    assert read_meta(branch.newest_checkpoint)["progress"]["run_id"] == ids[1]


def fetched(path: Path, address: str) -> list[int]:
    """Steps of the checkpoints in a new run's folder that `resume_from` has fetched."""
    source = ResumeFrom(ResumeFromOptions(address=address), folders(path))
    while not source.is_idle(1):
        pass
    source.copy(path)
    (path / "checkpoints").rename(path / "kept")
    return steps(path / "kept")


def test_resume_from_takes_the_newest_that_is_not_in_doubt_or_the_one_that_is_named(tmp_path: Path) -> None:
    old = tmp_path / "old"
    for step in (100, 200, 300):
        save(old, step)
    os.truncate(old / "checkpoints" / "step_00000300" / WEIGHTS, 3)
    marks = Marks([])
    marks.add(200, "one-200", "the next step was not finite")
    marks.write(old / "checkpoints")
    assert fetched(tmp_path / "a", f"file://{old}") == [100], "of a run folder"
    assert fetched(tmp_path / "b", f"file://{old}/checkpoints/step_00000200/") == [200]
    with pytest.raises(UserError, match=r"checkpoint\.resume_from: no copy in .* can be used:\n  - step 300: "):
        fetched(tmp_path / "c", f"file://{old}/checkpoints/step_00000300")
    with pytest.raises(UserError, match=r"checkpoint\.resume_from: .*/none: there is no complete checkpoint"):
        fetched(tmp_path / "d", f"file://{tmp_path}/none")
    with pytest.raises(UserError, match=r"/step_00000400: there is no complete checkpoint"):
        fetched(tmp_path / "d", f"file://{old}/checkpoints/step_00000400")
    save(tmp_path / "other", 100)
    assert fetched(tmp_path / "c", f"file://{tmp_path}/other") == [100]
    assert not (tmp_path / "c" / "kept" / MARKS).exists(), "nothing came from the source that was of no use"
    save(tmp_path / "e", 50)
    assert fetched(tmp_path / "e", f"file://{tmp_path}/none") == [50], "a checkpoint of its own: nothing is read"


def test_a_store_that_hangs_keeps_no_process_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(fetch, "complete_steps", lambda _files: {} if answers.wait(60) else None)
    source = ResumeFrom(ResumeFromOptions(address=f"file://{tmp_path}"), folders(tmp_path))
    assert not source.is_idle(0.01)
    assert [one.daemon for one in threading.enumerate() if one.name.startswith("resume-from")] == [True]
    answers.set()
    with pytest.raises(UserError, match="there is no complete checkpoint"):
        source.is_idle(60)


def test_two_ranks_upload_once_and_resume_on_one(run: Run, tmp_path: Path, line: Line) -> None:
    address = address_of(tmp_path)
    run.recipe["checkpoint"] |= {"upload": address}
    process = run.start(2, "--stop-at-step", "4")
    output, _ = process.communicate(120)
    assert process.returncode == 0, output
    weights = [path for path in line.puts if path.split("?")[0].endswith("safetensors")]
    assert sorted(Path(path.split("?")[0]).name for path in weights) == [WEIGHTS, "rank_1_0.safetensors"]
    shutil.rmtree(run.run_dir)
    assert run.train_here("--stop-at-step", "5") == 0
    assert [record["step"] for record in run.records("resume")] == [4]


def test_a_run_that_is_killed_while_it_uploads_goes_on_with_the_rest(run: Run, tmp_path: Path, line: Line) -> None:
    """No copy is complete then; the files that are there are not sent again."""
    address = address_of(tmp_path)
    run.recipe["checkpoint"] |= {"upload": address, "every": 12}
    line.bytes_per_s = 2e5
    process = run.start(1)
    files = RemoteFolder(address)
    deadline = time.monotonic() + 60
    while not any(name.endswith("index.json") for name in files.files()) and time.monotonic() < deadline:
        time.sleep(0.05)
    line.cut()
    process.kill()
    process.wait()
    found = files.files()
    assert f"step_00000012/{WEIGHTS}" not in found
    assert not complete_steps(found)
    assert (run.run_dir / "checkpoints" / "step_00000012").exists()

    line.bytes_per_s = 0
    line.puts.clear()
    assert run.train_here() == 0
    assert there(address) == [12]
    names = [Path(path.split("?")[0]).name for path in line.puts]
    assert "index.json" not in names
    assert names.count(WEIGHTS) == 1
    assert "manifest.json" in names


@pytest.mark.skipif("MOBA_UPLOAD_KILLS" not in os.environ, reason="MOBA_UPLOAD_KILLS=SEED asks for it; minutes")
def test_kills_at_random_and_new_disks_do_not_change_a_bit(run: Run, tmp_path: Path, corpora: Path, line: Line) -> None:
    """Over lines that are slow or torn, until a start comes to the end. Also prints the number of kills."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Run(tmp_path / "undisturbed", corpora)
    undisturbed.recipe["checkpoint"]["every"] = run.recipe["checkpoint"]["every"] = 2
    assert undisturbed.train_here() == 0
    run.recipe["checkpoint"]["upload"] = address_of(tmp_path)
    chance = random.Random(int(os.environ["MOBA_UPLOAD_KILLS"]))
    kills = new_disks = 0
    while True:
        line.bytes_per_s = chance.choice([0, 0, 3e5, 1e5])
        line.torn = chance.choice([0, 0, 1, 2])
        process = run.start(1)
        deadline = time.monotonic() + chance.uniform(1.5, 9)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.poll() is not None:
            break
        line.cut()
        process.kill()
        process.wait()
        kills += 1
        if chance.random() < 0.6:
            shutil.rmtree(run.run_dir, ignore_errors=True)
            new_disks += 1
    assert process.returncode == 0, process.communicate()[0]
    print(f"{kills} kills, {new_disks} new disks")
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)
    assert run.losses() == undisturbed.losses()


def test_an_interrupted_copy_is_not_found_and_is_replaced(tmp_path: Path, line: Line) -> None:
    address = address_of(tmp_path)
    remote = RemoteFolder(address)
    uploads = start(tmp_path, address)
    path = save(tmp_path, 100)
    remote.write(f"{path.name}/{WEIGHTS}", b"half of it")
    assert there(address) == []
    uploads.copy(path)
    ((text, good),) = wait(uploads)
    assert good
    assert text.startswith(f"the checkpoint of step 100 is uploaded to {address}: ")

    changed = save(tmp_path, 100, content="other")
    uploads.copy(changed)
    wait(uploads)
    uploads.copy(changed)
    assert wait(uploads) == [], "it is there"
    start(tmp_path / "new", address)
    copy = tmp_path / "new" / "checkpoints" / path.name
    verify_checkpoint(copy)
    assert (copy / WEIGHTS).read_text() == "other of step 100"


def test_a_copy_that_differs_from_its_manifest_is_passed_over_for_the_one_before(
    tmp_path: Path, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    address = address_of(tmp_path)
    uploads = start(tmp_path, address)
    for step in (100, 200):
        uploads.copy(save(tmp_path, step))
        wait(uploads)
    RemoteFolder(address).write(f"step_00000200/{WEIGHTS}", b"weights of step 2OO")
    start(tmp_path / "new", address)
    assert steps(tmp_path / "new" / "checkpoints") == [100]
    assert f"step_00000200/{WEIGHTS} is " in caplog.text
    assert [path.name for path in (tmp_path / "new" / "checkpoints").iterdir()] == ["step_00000100"]

    RemoteFolder(address).delete(f"step_00000100/{WEIGHTS}")
    with pytest.raises(StorageError, match=r"no copy in .* can be used:\n  - step 200: .*\n  - step 100: "):
        start(tmp_path / "third", address)


def test_a_checkpoint_in_doubt_is_not_fetched_while_there_is_another(tmp_path: Path, line: Line) -> None:
    address = address_of(tmp_path)
    uploads = start(tmp_path, address, keep_last=1)
    uploads.copy(save(tmp_path, 100))
    wait(uploads)
    marks = Marks([])
    marks.add(200, "one-200", "the next step was not finite")
    marks.write(tmp_path / "checkpoints")
    uploads.copy(save(tmp_path, 200))
    wait(uploads)
    assert there(address) == [100, 200], "the newest good one stays"
    start(tmp_path / "new", address)
    assert steps(tmp_path / "new" / "checkpoints") == [100]
    uploads.copy(save(tmp_path, 300, not_finite=["model.norm.weight"]))
    assert wait(uploads) == []
    assert there(address) == [100, 200]


def test_retention_of_its_own(tmp_path: Path, line: Line) -> None:
    address = address_of(tmp_path)
    uploads = start(tmp_path, address, keep_last=2, keep_every=200)
    remote = RemoteFolder(address)
    remote.write("step_00000050/left-by-a-kill", b"")
    remote.write("mine/step_00000050/notes", b"")
    for step in (100, 200, 300, 400, 500, 600):
        uploads.copy(save(tmp_path, step, good=step < 500))
        wait(uploads)
    assert there(address) == [200, 400, 500, 600]
    uploads = start(tmp_path, address, keep_last=1)
    uploads.copy(save(tmp_path, 700, good=False))
    wait(uploads)
    assert there(address) == [400, 700]
    assert "step_00000050/left-by-a-kill" not in remote.files()
    assert "mine/step_00000050/notes" in remote.files()


def test_a_full_bucket_is_told_and_the_next_checkpoint_is_copied(tmp_path: Path, line: Line) -> None:
    address = address_of(tmp_path)
    uploads = start(tmp_path, address)
    line.is_full = True
    uploads.copy(save(tmp_path, 100))
    ((text, good),) = wait(uploads)
    assert not good
    assert text.startswith("the checkpoint of step 100 was not uploaded: ")
    assert "bucket is full" in text
    line.is_full = False
    uploads.copy(save(tmp_path, 200))
    assert [good for _, good in wait(uploads)] == [True]
    assert there(address) == [200]


def test_torn_connections_are_tried_again(tmp_path: Path, line: Line) -> None:
    address = address_of(tmp_path)
    uploads = start(tmp_path, address)
    line.torn = 3
    uploads.copy(save(tmp_path, 100))
    assert [good for _, good in wait(uploads)] == [True]
    assert line.torn == 0
    start(tmp_path / "new", address)
    verify_checkpoint(tmp_path / "new" / "checkpoints" / "step_00000100")


def test_a_slow_store_gets_the_newest_checkpoints_and_those_to_keep(tmp_path: Path, line: Line) -> None:
    """Saving never waits for it, and what it copies is not deleted meanwhile."""
    address = address_of(tmp_path)
    uploads = start(tmp_path, address, keep_last=9, keep_every=300)
    line.bytes_per_s = 3e3
    began = time.monotonic()
    for step in (100, 200, 300, 400, 500):
        uploads.copy(save(tmp_path, step))
        if step == 100:
            assert not uploads.is_idle(0.05)
    assert time.monotonic() - began < 1
    line.bytes_per_s = 0
    wait(uploads)
    assert there(address) == [100, 300, 500]


def test_a_run_is_refused_where_the_store_cannot_be_used(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong credentials, no such bucket: before the first step, if there is nothing else to go on from."""
    with pytest.raises(UserError, match=r"s3://absent/run/run\.json: FileNotFoundError: The specified bucket does not"):
        start(tmp_path / "a", "s3://absent/run")
    wrong = "wrong-secret-of-somebody"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    address = address_of(tmp_path)
    run.recipe["checkpoint"] |= {"upload": address}
    assert run.train_here() == 2
    error = capsys.readouterr().err
    assert f"checkpoint.upload: {address}: PermissionError" in error
    assert wrong not in error
    assert not (run.run_dir / "metrics.jsonl").exists()

    save(tmp_path / "b", 100)
    uploads = Upload(UploadOptions(address=address), folders(tmp_path / "b"))
    ((text, good),) = wait(uploads)
    assert not good
    assert text.endswith("the run goes on from what is in its folder")


def test_the_runs_own_folder_is_no_place_for_copies(tmp_path: Path) -> None:
    """Retention of copies would delete the run's checkpoints."""
    for place in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(
            UserError, match=r"checkpoint\.upload: given file://.*, a folder of this run; give an address elsewhere"
        ):
            start(tmp_path, f"file://{place}/")


@pytest.mark.parametrize("key", ["upload", "resume_from"])
def test_a_run_that_saves_nothing_is_refused_with_an_address(
    run: Run, key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run.recipe["checkpoint"] = {"every": None, key: "file:///copies"}
    assert run.train_here() == 2
    assert f"checkpoint.{key}: given, but checkpoint.every is null; set it" in capfd.readouterr().err


@pytest.mark.parametrize("step", ["", "/step_00000004/"])
def test_copies_do_not_go_where_the_run_resumes_from(run: Run, step: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The newest of them would be used, whichever step is named."""
    address = f"file://{run.folder}/copies"
    run.recipe["checkpoint"] |= {"upload": address, "resume_from": address + step}
    assert run.train_here() == 2
    assert f"checkpoint.upload: given {address}, where checkpoint.resume_from reads; give" in capfd.readouterr().err


def test_another_run_is_refused(tmp_path: Path, line: Line) -> None:
    address = address_of(tmp_path)
    uploads = start(tmp_path / "one", address)
    uploads.copy(save(tmp_path / "one", 100))
    wait(uploads)
    other = save(tmp_path / "other", 50, "two")
    with pytest.raises(UserError, match="holds the checkpoints of run one, and this is run two; give each run an"):
        start(tmp_path / "other", address)
    uploads.copy(other)
    ((text, good),) = wait(uploads)
    assert not good
    assert "of run one, and this is run two" in text
    assert json.loads(RemoteFolder(address).read(upload.RUN, 1000) or b"") == {"run_id": "one"}
    with pytest.raises(UserError, match="holds the checkpoints of run one, and this is run two"):
        start(tmp_path / "other", f"file://{tmp_path}/one/checkpoints")


def test_a_kill_leaves_no_part_of_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could be uploaded to an address without a sound `run.json`."""
    store = RemoteFolder(f"file://{tmp_path}/store")
    store.write(upload.RUN, b"old")

    def killed(_descriptor: int) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(StorageError, match="killed"):
            store.write(upload.RUN, b"new")
    assert store.read(upload.RUN, 100) == b"old"


def test_a_fetch_that_breaks_off_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be taken for the whole of it by the next start."""
    address = f"file://{tmp_path}/store"
    uploads = start(tmp_path / "run", address)
    (tmp_path / "run" / METRICS).write_text("all records")
    uploads.copy(save(tmp_path / "run", 100))
    wait(uploads)

    def torn(_folder: RemoteFolder, _name: str, path: Path) -> None:
        path.write_text("half of")
        raise StorageError("torn")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "get", torn)
        with pytest.raises(StorageError, match="torn"):
            start(tmp_path / "new", address)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["checkpoints"]
    start(tmp_path / "new", address)
    assert (tmp_path / "new" / METRICS).read_text() == "all records"


def test_what_is_fetched_is_not_taken_for_what_a_kill_has_left(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = run.run_dir / "checkpoints" / ".tmp-step_00000004-01234567"
    leftover.mkdir(parents=True)
    run.recipe["checkpoint"]["upload"] = f"file://{run.folder}/store"
    made = Upload.__init__

    def fetching(upload: Upload, options: UploadOptions, of_run: RunFolders) -> None:
        assert not leftover.exists(), "is removed before a fetch begins"
        made(upload, options, of_run)

    monkeypatch.setattr(Upload, "__init__", fetching)
    assert run.train_here("--stop-at-step", "1") == 0


def test_a_folder_is_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PAUSES_S", ())
    address = f"file://{tmp_path}/store"
    uploads = start(tmp_path / "run", address)
    uploads.copy(save(tmp_path / "run", 100))
    assert [good for _, good in wait(uploads)] == [True]
    start(tmp_path / "new", address)
    verify_checkpoint(tmp_path / "new" / "checkpoints" / "step_00000100")
    assert local_path(address) == tmp_path / "store" / "step_00000100", "the newest copy"
    os.truncate(tmp_path / "store" / "step_00000100" / "manifest.json", 10)  # where a copy is no single step
    uploads.copy(tmp_path / "run" / "checkpoints" / "step_00000100")
    wait(uploads)
    start(tmp_path / "newer", address)
