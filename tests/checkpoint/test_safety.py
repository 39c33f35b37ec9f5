"""A checkpoint from elsewhere can neither run code, nor name files outside its folder, nor crash its reader."""

import json
import os
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from moba_train.checkpoint import manifest, publish
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.coverage import checked_storage
from moba_train.checkpoint.index import read_index
from moba_train.checkpoint.load import load_checkpoint
from moba_train.checkpoint.retention import Retention
from moba_train.errors import CheckpointError
from tests.checkpoint.checkpoint_ranks import process_group
from tests.checkpoint.test_publish import publish_step


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
    republish(path)
    with pytest.raises(CheckpointError, match="holds dict"):
        load_checkpoint(path, {})


def test_an_index_written_by_python_3_11_2_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stores members of enums by `getattr`: Debian 12 could not resume from its own checkpoints."""
    path = save_one(tmp_path)
    index = pickle.loads((path / ".metadata").read_bytes())
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    (path / ".metadata").write_bytes(pickle.dumps(index))
    assert b"getattr" in (path / ".metadata").read_bytes()
    republish(path)
    state = {"a": torch.ones(1000)}
    load_checkpoint(path, state, verify=True)
    torch.testing.assert_close(state["a"], torch.zeros(1000))


def test_an_index_that_the_manifest_does_not_vouch_for_is_refused(tmp_path: Path) -> None:
    path = publish_step(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"manifest has no \.metadata"):
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
    with pytest.raises(CheckpointError, match=rf"{name}: not a regular file; links"):
        manifest.read_meta(path)


def test_a_symbolic_link_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = publish_step(tmp_path / "checkpoints", 1)
    (path / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (path / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: not a regular file"):
        manifest.verify_checkpoint(path)


def test_a_manifest_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    path = publish_step(tmp_path / "checkpoints", 1)
    (path / "manifest.json").rename(tmp_path / "elsewhere")
    for make in (lambda file: file.symlink_to(tmp_path / "elsewhere"), os.mkfifo, Path.mkdir):
        file = path / "manifest.json"
        make(file)
        with pytest.raises(CheckpointError, match=r"manifest\.json: not a regular file"):
            manifest.read_manifest(path)
        file.rename(tmp_path / f"used-{make.__name__}")


def _change(field: str, value: object) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for place in index.storage_data.values():
            setattr(place, field, value)

    return change


def _chunks(index: Any) -> list[Any]:
    return index.state_dict_metadata["a"].chunks


def _chunk(index: Any) -> Any:
    return _chunks(index)[0]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (_change("relative_path", "../../secret"), "none of the checkpoint's files"),
        (_change("relative_path", "/etc/hostname"), "none of the checkpoint's files"),
        (_change("relative_path", ["__0_0.distcp"]), "none of the checkpoint's files"),
        (_change("offset", -8), "begins before"),
        (_change("length", 1 << 40), "ends beyond"),
        (_change("length", 3999), "larger than its 3999 bytes"),
        (_change("offset", "8"), "has no file, offset and length"),
        (_change("transform_descriptors", ["zstd"]), "transformed"),
        (lambda index: index.state_dict_metadata.update(a=3), "not described as a tensor"),
        (lambda index: setattr(index.state_dict_metadata["a"], "size", torch.Size([1 << 40])), "larger than all files"),
        (lambda index: setattr(index.state_dict_metadata["a"], "size", torch.Size([-1])), "not described as a tensor"),
        (lambda index: setattr(index.state_dict_metadata["a"], "size", torch.Size([999])), "not inside it"),
        (lambda index: setattr(index.state_dict_metadata["a"], "size", torch.Size([1001])), "cover it exactly once"),
        (lambda index: setattr(_chunk(index), "sizes", torch.Size([999])), "cover it exactly once"),
        (lambda index: setattr(_chunk(index), "sizes", [1000]), "without offsets and sizes"),
        (lambda index: setattr(_chunk(index), "offsets", torch.Size([1])), "not inside it"),
        (lambda index: setattr(_chunk(index), "offsets", torch.Size([])), "not inside it"),
        (lambda index: _chunks(index).clear(), "cover it exactly once"),
        (lambda index: _chunks(index).append(_chunk(index)), "listed twice"),
        (lambda index: _chunks(index).append(3), "without offsets and sizes"),
        (lambda index: index.storage_data.clear(), "not stored"),
        (lambda index: index.state_dict_metadata.clear(), "stored, but not described"),
        (lambda index: index.state_dict_metadata.update(b=index.state_dict_metadata["a"]), "shares its chunks"),
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


def repeated(opcodes: bytes, size: int) -> bytes:
    return opcodes * (size // len(opcodes))


DOUBLED = b")" + b"".join(b"\x94h" + bytes([level]) + b"\x86" for level in range(60))
"""t = (), then 60 times t = (t, t)."""
LISTS = b"]\x94" + b"".join(b"]\x94(" + 2 * (b"h" + bytes([level])) + b"e" for level in range(60))
"""t = [], then 60 times t = [t, t]."""
METADATA = b"\x8c\x25torch.distributed.checkpoint.metadata"
HOSTILE = {
    "an index into the memo that fills 64 GB": b"Nr\xff\xff\xff\xff.",
    "a text of 16 TB": b"\x8e" + (1 << 44).to_bytes(8, "little") + b"x.",
    "a text of 4 GB": b"X\xff\xff\xff\xffx.",
    "an array of 1 GB": b"\x96" + (1 << 30).to_bytes(8, "little") + b".",
    "a key that takes centuries to hash": b"}" + DOUBLED + b"Ns.",
    "a key that overflows the stack": b"})" + repeated(b"\x85", 1_000_000) + b"Ns.",
    "an argument that takes centuries to print": LISTS + METADATA + b"\x8c\x14_MEM_FORMAT_ENCODING\x93h\x3c\x85R.",
    "attributes for a class": METADATA + b"\x8c\x08Metadata\x93}\x8c\x01aK\x01sb.",
    "an attribute of anything but the enum": b"\x8c\x08builtins\x8c\x07getattr\x93\x8c\x01a\x8c\x05upper\x86R.",
    "half a million marks": repeated(b"(", 500_000) + b".",
    "half a million dicts": repeated(b"}", 500_000) + b".",
    "half a million memos": b"}" + repeated(b"\x94", 500_000) + b".",
    "lists in lists": b"]" + repeated(b"]", 250_000) + repeated(b"a", 250_000) + b".",
    "numbers of 255 bytes": repeated(b"\x8a\xff" + b"\x7f" * 255, 500_000) + b".",
    "a shape of huge numbers": b"\x8c\x05torch\x8c\x04Size\x93\x8a\xff" + b"\x7f" * 255 + b"\x85\x85R.",
    "a shape of 100,000 numbers": b"\x8c\x05torch\x8c\x04Size\x93(" + repeated(b"K\x01", 200_000) + b"t\x85R.",
    "nothing": b"",
    "no end": b"N",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_pickle_costs_no_more_than_its_length(tmp_path: Path, content: bytes) -> None:
    path = publish_step(tmp_path, 1)
    (path / ".metadata").write_bytes(content)
    republish(path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"\.metadata: is not an index"):
        load_checkpoint(path, {})
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200_000, "KiB"


@pytest.mark.parametrize("file", [".metadata", "meta.json", "manifest.json"])
def test_a_file_larger_than_it_can_need_to_be_is_not_read(tmp_path: Path, file: str) -> None:
    path = publish_step(tmp_path, 1)
    content = json.loads((path / "manifest.json").read_text())
    with (path / file).open("wb") as stream:
        stream.truncate(1 << 30)
    if file != "manifest.json":
        content["files"][file] = {"size": 1 << 30, "sha256": "0" * 64}
        (path / "manifest.json").write_text(json.dumps(content))
    began = time.process_time()
    with pytest.raises(CheckpointError, match=rf"{file}: (1073741824 bytes, at most|too large)"):
        read_index(path, manifest.read_manifest(path)) if file == ".metadata" else manifest.read_meta(path)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": [' + "[]," * 2_000_000 + "1]}", "more than 1000000 values"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "more than 100 levels deep"),
        ('{"a": ' + "9" * 10_000 + "}", "not valid JSON"),
        ('{"a": ' + '{"a": ' * 50_000, "more than 100 levels deep"),
    ],
)
def test_json_that_is_too_much_to_hold_is_refused_in_words(tmp_path: Path, content: str, words: str) -> None:
    path = publish_step(tmp_path, 1)
    (path / "meta.json").write_text(content)
    republish(path)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=rf"meta\.json: .*{words}"):
        manifest.read_meta(path)
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"manifest\.json: .*{words}"):
        manifest.read_manifest(path)
    assert time.process_time() - began < 2


def test_a_meta_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: more than 1000000 values"):
        manifest.write_json(tmp_path / "meta.json", {"skipped": [1] * 1_000_001})
    assert not (tmp_path / "meta.json").exists()


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
    """With a manifest that agrees: the hash of the file is not what protects."""
    path, whole = saved
    content = bytearray(whole)
    for position in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    (path / ".metadata").write_bytes(content)
    agreed = json.loads((path / "manifest.json").read_text())
    agreed["files"][".metadata"] = manifest.hash_file(path / ".metadata")
    (path / "manifest.json").write_text(json.dumps(agreed))
    tensor = torch.full((1000,), torch.nan)
    words = refusal(lambda: load_checkpoint(path, {"a": tensor}))
    assert str(path) in words if words is not None else torch.equal(tensor, torch.zeros(1000))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """A shape, and boxes (offsets, sizes) in it: cuts of the whole, some of which are then changed."""
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    cuts = [([0] * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offsets, sizes = cuts.pop(draw(st.integers(0, len(cuts) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[axis]))
        rest = [offset + at * (a == axis) for a, offset in enumerate(offsets)]
        cuts.append((offsets, [at if a == axis else size for a, size in enumerate(sizes)]))
        cuts.append((rest, [size - at * (a == axis) for a, size in enumerate(sizes)]))
    for offsets, sizes in draw(st.lists(st.sampled_from(cuts), max_size=2)):
        if shape:
            axis = draw(st.integers(0, len(shape) - 1))
            offsets[axis] = draw(st.integers(0, shape[axis] - sizes[axis]))
    return shape, cuts


@given(boxes())
def test_chunks_are_accepted_if_and_only_if_they_cover_the_tensor_once(
    case: tuple[list[int], list[tuple[list[int], list[int]]]],
) -> None:
    shape, cuts = case
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in cuts:
        counts[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in cuts]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
    nonzero = [chunk for chunk in chunks if 0 not in chunk.sizes]
    places = [("a", chunk.offsets, _StorageInfo("f", 1000 * i, 1000)) for i, chunk in enumerate(nonzero)]
    files = {"f": manifest.FileEntry(size=100_000, sha256="")}
    try:
        storage = checked_storage({"a": tensor}, places, files)
    except ValueError:
        assert not bool((counts == 1).all())
    else:
        assert bool((counts == 1).all())
        assert len(storage) == len(nonzero)


def test_chunks_that_share_bytes_of_a_file_are_refused() -> None:
    """Also where a chunk of another file begins between them."""

    def tensor() -> TensorStorageMetadata:
        chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([8]))
        return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([8]), [chunk])

    def check(**stored: _StorageInfo) -> None:
        places = [(name, torch.Size([0]), place) for name, place in stored.items()]
        files = {name: manifest.FileEntry(size=200, sha256="") for name in "fg"}
        checked_storage({name: tensor() for name in stored}, places, files)

    check(a=_StorageInfo("f", 0, 100), b=_StorageInfo("f", 100, 100), c=_StorageInfo("g", 50, 100))
    with pytest.raises(ValueError, match="'a' and 'b' share bytes of f"):
        check(a=_StorageInfo("f", 0, 100), b=_StorageInfo("f", 99, 100), c=_StorageInfo("g", 50, 100))


def test_a_chunk_that_is_stored_twice_is_refused() -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([8]))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([8]), [chunk])
    places = [("a", torch.Size([0]), _StorageInfo("f", offset, 100)) for offset in (0, 100)]
    with pytest.raises(ValueError, match=r"'a': the chunk at \[0\] is stored twice"):
        checked_storage({"a": tensor}, places, {"f": manifest.FileEntry(size=200, sha256="")})
