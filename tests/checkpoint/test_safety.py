"""A checkpoint from elsewhere can neither run code, nor name files outside its folder, nor crash its reader."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import process_group
from hypothesis import given
from hypothesis import strategies as st
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


def save_one(folder: Path) -> Path:
    """A checkpoint of one tensor."""
    with process_group(folder / "store"):
        checkpointer = Checkpointer(folder / "checkpoints", Retention(1))
        checkpointer.save(1, {"a": torch.zeros(1000)}, {"x": 1})
        checkpointer.close()
    return folder / "checkpoints" / "step_00000001"


@pytest.mark.parametrize(
    ("file", "refusal"),
    [(".metadata", r"posix\.mkdir has no place in a checkpoint's index"), ("__0_0.distcp", "Weights only load failed")],
)
def test_malicious_pickles_are_not_executed(tmp_path: Path, file: str, refusal: str) -> None:
    path, trace = save_one(tmp_path), tmp_path / "executed"
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


def _lead(names: dict[str, Any], to: str) -> None:
    names[to] = names.pop("__0_0.distcp")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "a/b", "", "a\0b", "\ud800", "x" * 300])
def test_a_manifest_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    path = publish_step(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints" / "secret").write_text("secret")
    content = json.loads((path / "manifest.json").read_text())
    _lead(content["files"], name)
    (path / "manifest.json").write_text(json.dumps(content))
    for read in (manifest.check_sizes, manifest.verify_checkpoint):
        with pytest.raises(CheckpointError, match="allowed: plain names"):
            read(path)
    assert publish.latest_checkpoint(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("name", [manifest.MANIFEST, manifest.META])
def test_a_linked_manifest_or_meta_is_refused(tmp_path: Path, name: str) -> None:
    path = publish_step(tmp_path, 1)
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"{name}: is a link; allowed: a regular file"):
        manifest.read_json(path / name)


def test_a_symbolic_link_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = publish_step(tmp_path / "checkpoints", 1)
    (path / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (path / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: not a regular file"):
        manifest.verify_checkpoint(path)


def _change(field: str, value: object) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for place in index.storage_data.values():
            setattr(place, field, value)

    return change


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (_change("relative_path", "../../secret"), "none of the checkpoint's files"),
        (_change("relative_path", "/etc/hostname"), "none of the checkpoint's files"),
        (_change("offset", -8), "is stored at"),
        (_change("length", 1 << 40), "ends beyond"),
        (_change("offset", "8"), "is not an index"),
        (_change("transform_descriptors", ["zstd"]), "is stored at"),
        (lambda index: index.state_dict_metadata.update(a=3), "not described as a tensor"),
        (lambda index: setattr(index.state_dict_metadata["a"], "size", torch.Size([1 << 40])), "larger than all files"),
        (lambda index: setattr(index.state_dict_metadata["a"], "size", torch.Size([-1])), "larger than all files"),
        (lambda index: setattr(index, "state_dict_metadata", None), "is not an index"),
        (lambda index: delattr(index.state_dict_metadata["a"], "size"), "is not an index"),
    ],
)
def test_an_index_that_leads_elsewhere_or_lies_is_refused(tmp_path: Path, change: Any, refusal: str) -> None:
    path = save_one(tmp_path)
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    republish(path)
    with pytest.raises(CheckpointError, match=refusal):
        load_checkpoint(path, {"a": torch.zeros(1000)}, verify=True)


def test_a_pickle_cannot_claim_memory_that_it_does_not_fill(tmp_path: Path) -> None:
    """Four bytes of index into the memo make C's unpickler allocate and fill 64 GB; so does a length it believes."""
    path = publish_step(tmp_path, 1)
    for claim in (b"Nr\xff\xff\xff\xff.", b"\x8e" + (1 << 44).to_bytes(8, "little") + b"x."):
        (path / ".metadata").write_bytes(claim)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            load_checkpoint(path, {})


def refusal(action: Callable[[], object]) -> str | None:
    """The text of the CheckpointError that `action` ends in, if it does; any other exception is a failure."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
manifests = st.fixed_dictionaries(
    {"format_version": st.just(1) | json_values, "files": st.dictionaries(st.text(max_size=8), json_values, max_size=3)}
    | {"step": json_values},
)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_step(tmp_path_factory.mktemp("fuzz"), 1)


@given(content=st.binary(max_size=64) | (json_values | manifests).map(json.dumps).map(str.encode))
def test_any_manifest_is_read_or_refused_in_words(victim: Path, content: bytes) -> None:
    (victim / "manifest.json").write_bytes(content)
    words = refusal(lambda: manifest.verify_checkpoint(victim))
    assert words is None or "manifest.json" in words or "damaged" in words


def test_a_manifest_nested_beyond_reason_is_refused_in_words(victim: Path) -> None:
    for depth in (10_000, 1_000_000):
        (victim / "manifest.json").write_text("[" * depth)
        with pytest.raises(CheckpointError, match="manifest"):
            manifest.check_sizes(victim)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = save_one(tmp_path_factory.mktemp("index"))
    return path, (path / ".metadata").read_bytes()


@given(data=st.data())
def test_any_damaged_index_is_refused_in_words_or_harmless(saved: tuple[Path, bytes], data: st.DataObject) -> None:
    path, whole = saved
    content = bytearray(whole)
    for position in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    (path / ".metadata").write_bytes(content)
    words = refusal(lambda: load_checkpoint(path, {"a": torch.zeros(1000)}))
    assert words is None or str(path) in words
