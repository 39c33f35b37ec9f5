"""A checkpoint from elsewhere can neither run code, nor name files outside its folder, nor crash its reader."""

import json
import math
import os
import resource
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from moba_train.checkpoint import manifest, publish
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.index import INDEX, Chunk, SavedTensor, check_coverage, read_index
from moba_train.checkpoint.load import load_checkpoint
from moba_train.checkpoint.retention import Retention
from moba_train.errors import CheckpointError
from tests.checkpoint.checkpoint_ranks import process_group
from tests.checkpoint.test_publish import publish_step


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


def test_nothing_in_a_checkpoint_is_a_pickle_or_code(tmp_path: Path) -> None:
    """Its files are JSON and safetensors, and what reads them has no way to run anything."""
    path = save_one(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == [INDEX, "manifest.json", "meta.json", "rank_0_0.safetensors"]
    for name in (INDEX, "manifest.json", "meta.json"):
        assert isinstance(json.loads((path / name).read_text()), dict)
    assert torch.equal(load_file(path / "rank_0_0.safetensors")["a"], torch.zeros(1000))


@pytest.mark.parametrize("text", ['["tensors"]', "3", "", "\xff", '{"tensors": '])
def test_an_index_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = publish_step(tmp_path, 1)
    (path / INDEX).write_text(text, encoding="latin-1")
    republish(path)
    with pytest.raises(CheckpointError, match=r"index\.json: (holds \w+, must hold a JSON object|is not valid JSON)"):
        load_checkpoint(path, {})


def test_an_index_that_the_manifest_does_not_vouch_for_is_refused(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    content = json.loads((path / "manifest.json").read_text())
    del content["files"][INDEX]
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"manifest has no index\.json"):
        load_checkpoint(path, {})


def _lead(names: dict[str, Any], to: str) -> None:
    names[to] = names.pop("rank_0_0.safetensors")


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
    (path / "rank_0_0.safetensors").rename(tmp_path / "elsewhere")
    (path / "rank_0_0.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"rank_0_0\.safetensors: not a regular file"):
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


def _entry(index: Any) -> Any:
    return index["tensors"]["a"]


def _chunk(index: Any) -> Any:
    return _entry(index)["chunks"][0]


def _set(of: Callable[[Any], Any], key: Any, value: object) -> Callable[[Any], None]:
    return lambda index: of(index).__setitem__(key, value)


FILE, BEGIN, OFFSETS, SIZES = range(4)
"""Of a chunk."""


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (_set(_chunk, FILE, "../../secret"), "none of the checkpoint's files"),
        (_set(_chunk, FILE, "/etc/hostname"), "none of the checkpoint's files"),
        (_set(_chunk, FILE, INDEX), "none of the checkpoint's files"),
        (_set(_chunk, FILE, ["rank_0_0.safetensors"]), "without file, first byte"),
        (_set(_chunk, BEGIN, -8), "without file, first byte"),
        (_set(_chunk, BEGIN, "8"), "without file, first byte"),
        (_set(_chunk, BEGIN, 8.0), "without file, first byte"),
        (_set(_chunk, BEGIN, True), "without file, first byte"),
        (_set(_chunk, BEGIN, 1 << 40), "does not end with rank_0_0"),
        (_set(_chunk, BEGIN, 8), "does not end with rank_0_0"),
        (_set(_chunk, SIZES, [999]), "cover it exactly once"),
        (_set(_chunk, SIZES, 1000), "without file, first byte"),
        (_set(_chunk, SIZES, [1 << 63]), "without file, first byte"),
        (_set(_chunk, SIZES, [0]), "cover it exactly once"),
        (_set(_chunk, OFFSETS, [1]), "cover it exactly once"),
        (_set(_chunk, OFFSETS, []), "cover it exactly once"),
        (lambda index: _chunk(index).append(0), "without file, first byte"),
        (_set(_entry, "chunks", []), "cover it exactly once"),
        (_set(_entry, "chunks", {}), "not described as a tensor"),
        (lambda index: _entry(index)["chunks"].append(_chunk(index)), "cover it exactly once"),
        (lambda index: _entry(index)["chunks"].append(3), "without file, first byte"),
        (_set(_entry, "shape", [1 << 40]), "cover it exactly once"),
        (_set(_entry, "shape", [-1]), "not described as a tensor"),
        (_set(_entry, "shape", [1] * 17), "not described as a tensor"),
        (_set(_entry, "shape", [999]), "cover it exactly once"),
        (_set(_entry, "shape", [1001]), "cover it exactly once"),
        (_set(_entry, "dtype", "F4"), "not described as a tensor"),
        (_set(_entry, "dtype", ["F32"]), "not described as a tensor"),
        (_set(_entry, "dtype", "F64"), "does not end with rank_0_0"),
        (lambda index: _entry(index).pop("shape"), "not described as a tensor"),
        (lambda index: index["tensors"].update(a=3), "not described as a tensor"),
        (lambda index: index["tensors"].update(b=_entry(index)), "'b' does not begin where 'a' ends in rank_0_0"),
        (lambda index: index.update(tensors=None), "is not an index"),
        (lambda index: index.clear(), "is not an index"),
    ],
)
def test_an_index_that_leads_elsewhere_or_lies_is_refused(tmp_path: Path, change: Any, refusal: str) -> None:
    path = save_one(tmp_path)
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(index))
    republish(path)
    with pytest.raises(CheckpointError, match=refusal):
        load_checkpoint(path, {"a": torch.zeros(1000)}, verify=True)


SHAPE = '{"tensors": {"a": {"dtype": "U8", "chunks": [], "shape": ['
CHUNK = '["rank_0_0.safetensors", 0, [0, 0, 0, 0], [1, 1, 1, 1]]'
HOSTILE = {
    "lists in lists": "[" * 500_000,
    "330,000 empty lists": '{"tensors": [' + "[]," * 330_000 + "1]}",
    "80,000 tensors": '{"tensors": {' + ",".join(f'"{number}":[]' for number in range(80_000)) + "}}",
    "a number of a million digits": '{"tensors": {"a": ' + "9" * 1_000_000 + "}}",
    "a shape of 500,000 numbers": '{"tensors": {"a": {"dtype": "U8", "chunks": [], "shape": ['
    + "1," * 500_000
    + "1]}}}",
    "a shape of huge numbers": '{"tensors": {"a": {"dtype": "U8", "chunks": [], "shape": [' + "9" * 4000 + "]}}}",
    "one chunk 18,000 times": '{"tensors": {"a": {"dtype": "U8", "shape": [2, 2, 2, 2], "chunks": ['
    + ",".join([CHUNK] * 18_000)
    + "]}}}",
    "nothing": "",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_index_costs_no_more_than_its_length(tmp_path: Path, content: str) -> None:
    """Each has up to 1 MiB, as an index of few files may have."""
    path = publish_step(tmp_path, 1)
    (path / INDEX).write_text(content)
    republish(path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"index\.json: (is not an index|is not valid JSON|is nested)"):
        load_checkpoint(path, {})
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000, "KiB"


@pytest.mark.parametrize("file", [INDEX, "meta.json", "manifest.json"])
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
        read_index(path, manifest.read_manifest(path)) if file == INDEX else manifest.read_meta(path)
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
    {
        "format_version": st.just(manifest.FORMAT_VERSION) | json_values,
        "files": st.dictionaries(st.text(max_size=8), json_values, max_size=3),
    }
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
    return path, (path / INDEX).read_bytes()


@given(data=st.data())
def test_any_damaged_index_is_refused_in_words_or_harmless(saved: tuple[Path, bytes], data: st.DataObject) -> None:
    """With a manifest that agrees: the hash of the file is not what protects."""
    path, whole = saved
    content = bytearray(whole)
    for position in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    (path / INDEX).write_bytes(content)
    agreed = json.loads((path / "manifest.json").read_text())
    agreed["files"][INDEX] = manifest.hash_file(path / INDEX)
    (path / "manifest.json").write_text(json.dumps(agreed))
    tensor = torch.full((1000,), torch.nan)
    words = refusal(lambda: load_checkpoint(path, {"a": tensor}))
    assert str(path) in words if words is not None else torch.equal(tensor, torch.zeros(1000))


def covers(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> tuple[bool, bool]:
    """Whether boxes (offsets, sizes) cover a tensor of this shape exactly once, and whether they are accepted."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in boxes:
        counts[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    chunks = []
    end = 8
    for offsets, sizes in boxes:
        chunks.append(Chunk("f", end, tuple(offsets), tuple(sizes)))
        end += 4 * math.prod(sizes)
    try:
        check_coverage({"a": SavedTensor(torch.float32, tuple(shape), chunks)}, {"f": end})
    except ValueError:
        return bool((counts == 1).all()), False
    return bool((counts == 1).all()), True


def grid(cuts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """The cells of a grid with these cuts along each axis, ends included."""
    intervals = [[*pairwise(sorted(set(along)))] for along in cuts]
    return [([begin for begin, _ in cell], [end - begin for begin, end in cell]) for cell in product(*intervals)]


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=3), st.randoms(use_true_random=False))
def test_the_parts_of_any_dtensor_are_accepted_in_any_order(cuts: list[list[int]], random: Random) -> None:
    boxes = grid([[0, 5, *along] for along in cuts])
    random.shuffle(boxes)
    assert covers([5] * len(cuts), boxes) == (True, True)


@given(st.data())
def test_chunks_are_accepted_only_if_they_cover_the_tensor_once(data: st.DataObject) -> None:
    """A grid of which a few cells were moved, stretched, doubled or left out."""
    dimensions = data.draw(st.integers(1, 3))
    boxes = grid([[0, 5, *data.draw(st.lists(st.integers(1, 4), max_size=2))] for _ in range(dimensions)])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(boxes) - 1)) if boxes else 0
        what = data.draw(st.sampled_from(["double", "leave out", "change"]))
        if what == "double":
            boxes += boxes[at : at + 1]
        elif what == "leave out":
            del boxes[at : at + 1]
        elif boxes:
            axis = data.draw(st.integers(0, dimensions - 1))
            offsets, sizes = [*boxes[at][0]], [*boxes[at][1]]
            offsets[axis] = data.draw(st.integers(0, 4))
            sizes[axis] = data.draw(st.integers(0, 5 - offsets[axis]))
            boxes[at] = offsets, sizes
    once, accepted = covers([5] * dimensions, boxes)
    assert once or not accepted


def test_boxes_that_cover_a_tensor_once_without_a_grid_are_refused() -> None:
    """No layout of ours has them, and to tell them from those that do not takes a longer check."""
    assert covers([2, 2], [([0, 0], [2, 1]), ([0, 1], [1, 1]), ([1, 1], [1, 1])]) == (True, False)


def test_chunks_that_share_bytes_of_a_file_or_leave_some_are_refused() -> None:
    """Also where a chunk of another file begins between them."""

    def check(**stored: tuple[str, int]) -> None:
        tensors = {
            name: SavedTensor(torch.float32, (25,), [Chunk(file, begin, (0,), (25,))])
            for name, (file, begin) in stored.items()
        }
        check_coverage(tensors, {"f": 208, "g": 208, "meta.json": 10})

    check(a=("f", 8), b=("f", 108), c=("g", 108))
    for begin in (7, 9):
        with pytest.raises(ValueError, match="'b' does not begin where 'a' ends in f"):
            check(a=("f", begin), b=("f", 108), c=("g", 108))
        with pytest.raises(ValueError, match="'c' does not end with g"):
            check(a=("f", 8), b=("f", 108), c=("g", begin))
