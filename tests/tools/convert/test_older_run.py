"""A run that commit bc717461 began, whose checkpoints had a pickled index, goes on once they are converted, with the
losses that it had then."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.manifest import MANIFEST, META, hash_file, read_meta, verify_checkpoint
from moba_train.checkpoint.publish import latest_checkpoint, published
from moba_train.tools.cli import app
from moba_train.tools.saved_recipe import open_checkpoint
from tests.run.test_older_run import CHECKPOINT, FIXTURE, older_run, records, train_in
from tests.run.trainer_ranks import Ranks

__all__ = ["older_run"]


def convert(path: Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["convert", "checkpoints", str(path)])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_a_converted_run_goes_on_as_the_older_version_did(older_run: Path, ranks: Ranks) -> None:
    """On two ranks with context parallelism. Same learning rates, losses, evaluations and stage ends: counters, data
    order, optimizer state and the stage's exit criterion are all restored. In every digit on the CPU that trained the
    older run, and up to rounding on others."""
    convert(older_run)
    ranks.work(train_in, [str(older_run.parent)], 2)
    for record_type in ("metrics", "validation_loss", "position_wise"):
        ours = [record for record in records(older_run / "metrics.jsonl", record_type) if record["step"] > 6]
        theirs = records(FIXTURE / "continued.jsonl", record_type)
        assert [record["step"] for record in ours] == [record["step"] for record in theirs] != []
        for got, want in zip(ours, theirs, strict=True):
            for key, value in want.items():
                expected = pytest.approx(value, rel=1e-5, abs=1e-5) if isinstance(value, float) else value
                assert got[key] == expected, key
    newest = latest_checkpoint(older_run / "checkpoints")
    assert newest is not None
    assert read_meta(newest)["progress"]["step"] == 9


def test_commands_refuse_older_checkpoints_and_name_the_one_that_converts_them(older_run: Path) -> None:
    command = "moba-train convert checkpoints run"
    with pytest.raises(UnreadableError, match=command):
        open_checkpoint(Path("run"))
    for arguments in (["verify"], ["convert", "moba-to-hf"], ["generate", "--prompt", "x"]):
        output = ["out"] if "moba-to-hf" in arguments else []
        done = CliRunner().invoke(app, [*arguments, "run", *output])
        assert done.exit_code == 2
        assert command in " ".join(done.output.split())


def test_a_conversion_keeps_the_bits_the_meta_and_the_names(older_run: Path) -> None:
    """Compared with what torch reads from the older files."""
    index = pickle.loads((CHECKPOINT / ".metadata").read_bytes())
    meta = (CHECKPOINT / META).read_bytes()
    content = {name: (CHECKPOINT / name).read_bytes() for name in ("__0_0.distcp", "__1_0.distcp")}
    assert f"{CHECKPOINT}: converted" in convert(older_run)
    assert [path for _, path in published(older_run / "checkpoints")] == [older_run.parent / CHECKPOINT]
    assert sorted(path.name for path in (older_run / "checkpoints").iterdir()) == ["latest", "step_00000006"]
    verify_checkpoint(CHECKPOINT)
    assert (CHECKPOINT / META).read_bytes() == meta
    reader = CheckpointReader(CHECKPOINT)
    assert reader.tensors.keys() == index.state_dict_metadata.keys()
    compared = 0
    for key, place in index.storage_data.items():
        stored = content[place.relative_path][place.offset : place.offset + place.length]
        (older_run / "tensor").write_bytes(stored)
        part = torch.load(older_run / "tensor")
        box = tuple(slice(begin, begin + size) for begin, size in zip(key.offset, part.shape, strict=True))
        assert torch.equal(reader.read(key.fqn)[box], part)
        compared += part.numel()
    assert compared == sum(reader.read(name).numel() for name in reader.tensors)
    saved = open_checkpoint(older_run)
    assert (saved.stage.name, saved.config.model.layers) == ("moba", 1)
    assert "nothing to convert" in convert(older_run)
    assert "nothing to convert" in convert(CHECKPOINT)


def test_a_damaged_checkpoint_is_not_converted_and_stays(older_run: Path) -> None:
    file = CHECKPOINT / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "__1_0.distcp: its SHA-256" in convert(older_run, 2)
    assert sorted(path.name for path in (older_run / "checkpoints").iterdir()) == ["latest", "step_00000006"]
    assert file.read_bytes() == content


def test_a_conversion_that_is_interrupted_leaves_the_older_checkpoint(
    older_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in CHECKPOINT.iterdir()}
    for raised, code in ((KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 2)):

        def fail(*_: object, raised: BaseException = raised, **__: object) -> None:
            raise raised

        with monkeypatch.context() as patch:
            patch.setattr(torch, "load", fail)
            convert(older_run, code)
        assert {file.name: file.read_bytes() for file in CHECKPOINT.iterdir()} == before
        assert sorted(path.name for path in (older_run / "checkpoints").iterdir()) == ["latest", "step_00000006"]


def test_a_checkpoint_whose_replacement_was_killed_is_put_back(older_run: Path) -> None:
    """Between its two renames: by its own name it is converted as well."""
    checkpoint = older_run / "checkpoints" / "step_00000006"
    checkpoint.rename(checkpoint.with_name(".replaced-step_00000006"))
    convert(checkpoint, 0)
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["latest", "step_00000006"]


def test_a_folder_without_checkpoints_stays_as_it_is(tmp_path: Path) -> None:
    for name in (".tmp-notes", ".replaced-notes"):
        (tmp_path / name).mkdir()
    convert(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".replaced-notes", ".tmp-notes"]


class Malicious:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_malicious_pickle_is_not_executed_while_it_is_converted(older_run: Path, name: str) -> None:
    """With a manifest that agrees."""
    trace = older_run / "executed"
    if name == ".metadata":
        (CHECKPOINT / name).write_bytes(pickle.dumps(Malicious(trace)))
    else:
        size = (CHECKPOINT / name).stat().st_size
        index = pickle.loads((CHECKPOINT / ".metadata").read_bytes())
        for place in index.storage_data.values():
            place.offset = place.offset if place.relative_path != name else 0
        (CHECKPOINT / ".metadata").write_bytes(pickle.dumps(index))
        torch.save(Malicious(trace), CHECKPOINT / name, _use_new_zipfile_serialization=False)
        (CHECKPOINT / name).write_bytes((CHECKPOINT / name).read_bytes().ljust(size, b"\0"))
    files = {file.name: hash_file(file) for file in CHECKPOINT.iterdir() if file.name != MANIFEST}
    content = {"format_version": 1, "step": 6, "files": files}
    (CHECKPOINT / MANIFEST).write_text(json.dumps(content))
    assert "cannot be converted" in convert(older_run, 2)
    assert not trace.exists()
