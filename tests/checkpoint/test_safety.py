"""A checkpoint from elsewhere must not be able to run code."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import process_group
from test_publish import publish_step

from moba_train.checkpoint import manifest, publish
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.load import load_checkpoint
from moba_train.checkpoint.retention import Retention
from moba_train.errors import CheckpointError


class Malicious:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def republish(path: Path) -> None:
    """Gives the tampered checkpoint a manifest that agrees with it, as an attacker would."""
    (path / manifest.MANIFEST).unlink()
    temporary = publish.make_temporary_folder(path.parent, 1)
    path.rename(temporary)
    publish.publish(temporary, 1, {file.name: manifest.hash_file(file) for file in temporary.iterdir()})


@pytest.mark.parametrize(
    ("file", "refusal"),
    [(".metadata", r"posix\.mkdir has no place in a checkpoint's index"), ("__0_0.distcp", "Weights only load failed")],
)
def test_malicious_pickles_are_not_executed(tmp_path: Path, file: str, refusal: str) -> None:
    with process_group(tmp_path / "store"):
        checkpointer = Checkpointer(tmp_path / "checkpoints", Retention(1))
        checkpointer.save(1, {"a": torch.zeros(1000)}, {})
        checkpointer.close()
    path, trace = tmp_path / "checkpoints" / "step_00000001", tmp_path / "executed"
    if file == ".metadata":
        (path / file).write_bytes(pickle.dumps(Malicious(trace)))
    else:
        size = (path / file).stat().st_size
        torch.save(Malicious(trace), path / file, _use_new_zipfile_serialization=False)
        (path / file).write_bytes((path / file).read_bytes().ljust(size, b"\0"))
    republish(path)

    with pytest.raises(CheckpointError, match=refusal):
        load_checkpoint(path, {"a": torch.zeros(1000)}, verify=True)
    assert not trace.exists()


def test_an_index_of_another_type_is_refused(tmp_path: Path) -> None:
    path = publish_step(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="holds dict"):
        load_checkpoint(path, {})
