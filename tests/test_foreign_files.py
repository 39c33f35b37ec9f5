"""Files from elsewhere: regular ones of limited size, below the folders that are allowed, and nothing else."""

import os
import socket
from pathlib import Path

import pytest

from moba_train.errors import ForeignFileError, UserError
from moba_train.foreign_files import (
    ROOTS,
    check_below,
    folder_roots,
    open_foreign,
    parse_json,
    read_foreign,
    read_foreign_json,
    working_roots,
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, with a secret beside it."""
    monkeypatch.delenv(ROOTS, raising=False)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "model/inner").mkdir(parents=True)
    (tmp_path / "model/inner/own").write_text("own")
    return tmp_path / "model"


def test_what_lies_in_the_folder_is_read_also_through_links(model: Path) -> None:
    (model / "link").symlink_to("inner/own")
    (model / "folder").symlink_to(model / "inner")
    for name in ("inner/own", "link", "folder/own", "inner/../link"):
        assert read_foreign(model / name, 3, folder_roots(model)) == b"own"


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "inner/../../secret", "/proc/self/environ", "again"])
def test_links_that_lead_out_are_refused_with_what_would_allow_them(model: Path, target: str) -> None:
    (model / "again").symlink_to("../secret")
    (model / "merges.txt").symlink_to(target)
    with pytest.raises(ForeignFileError, match=rf"merges\.txt: leads to \S+, outside of \S+model; .*{ROOTS}=/"):
        open_foreign(model / "merges.txt", None, folder_roots(model))


def test_each_allowed_folder_is_named_once(model: Path) -> None:
    with pytest.raises(ForeignFileError) as error:
        check_below(model.parent / "secret", [model, model, model / "inner"])
    assert f"outside of {model} and {model / 'inner'}; if you trust it" in str(error.value)


def test_a_folder_that_is_a_link_leads_out_as_well(model: Path) -> None:
    (model / "folder").symlink_to(model.parent)
    with pytest.raises(ForeignFileError, match=r"leads to \S+secret, outside"):
        open_foreign(model / "folder/secret", None, folder_roots(model))


def test_the_user_may_allow_more_folders(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "link").symlink_to("../secret")
    monkeypatch.setenv(ROOTS, f"/nowhere:{model.parent}")
    assert read_foreign(model / "link", 6, folder_roots(model)) == b"secret"
    assert read_foreign(model / "link", 6, working_roots()) == b"secret"


def test_a_snapshot_in_the_cache_of_hugging_face_may_link_to_its_blobs(model: Path) -> None:
    repository = model / "models--owner--name"
    (repository / "snapshots/0123abcd").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs/abc").write_text("{}")
    (repository / "snapshots/0123abcd/config.json").symlink_to("../../blobs/abc")
    roots = folder_roots(repository / "snapshots/0123abcd")
    assert read_foreign_json(repository / "snapshots/0123abcd/config.json", roots=roots) == {}
    with pytest.raises(ForeignFileError, match="outside"):
        read_foreign(model / "inner/own", 3, roots)


def test_only_regular_files_are_opened(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe would wait for a writer, and reading /dev/zero never ends."""
    os.mkfifo(model / "pipe")
    with socket.socket(socket.AF_UNIX) as stream:
        monkeypatch.chdir(model)  # the name of a socket is short
        stream.bind("socket")
    (model / "linked pipe").symlink_to("pipe")
    kinds = {"pipe": "a named pipe", "linked pipe": "a named pipe", "socket": "a socket", "inner": "a folder"}
    for name, kind in kinds.items():
        for roots in (None, folder_roots(model)):
            with pytest.raises(ForeignFileError, match=f"is {kind}; allowed: a regular file"):
                open_foreign(model / name, None, roots)
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(ForeignFileError, match="is a device; allowed: a regular file"):
            open_foreign(Path(device), None)


def test_links_are_refused_where_there_must_be_none(model: Path) -> None:
    (model / "link").symlink_to("inner/own")
    with pytest.raises(ForeignFileError, match="is a link; allowed: a regular file"):
        open_foreign(model / "link", None, links=False)


def test_sizes_are_limited_also_where_the_file_system_says_0(model: Path) -> None:
    assert read_foreign(model / "inner/own", 3) == b"own"
    with pytest.raises(ForeignFileError, match="own: has 3 bytes; allowed: 2"):
        read_foreign(model / "inner/own", 2)
    if Path("/proc/self/maps").exists():
        with pytest.raises(ForeignFileError, match="has more than 10 bytes; allowed: 10"):
            read_foreign(Path("/proc/self/maps"), 10)


@pytest.mark.parametrize("exchanged", ["inner/own", "inner"])
def test_a_link_that_appears_after_the_check_is_not_followed(
    model: Path, exchanged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker waits until the name has been checked, then puts a link in the place of the file or its folder."""
    (model.parent / "own").write_text("secret")

    def check_then_exchange(path: Path, roots: list[Path]) -> Path:
        real = check_below(path, roots)
        (model / exchanged).rename(model / "away")
        (model / exchanged).symlink_to(model.parent if exchanged == "inner" else model.parent / "secret")
        return real

    monkeypatch.setattr("moba_train.foreign_files.check_below", check_then_exchange)
    with pytest.raises(OSError, match=r"own|inner"):
        open_foreign(model / "inner/own", None, folder_roots(model))


def test_paths_that_are_none_are_refused(model: Path) -> None:
    for roots in (None, folder_roots(model)):
        with pytest.raises(ForeignFileError, match="null byte"):
            open_foreign(Path("a\0b"), None, roots)
    (model / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="circle"):
        open_foreign(model / "circle", None, folder_roots(model))


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff", b"", b"{"])
def test_json_that_cannot_be_read_is_an_error_of_the_users(model: Path, text: bytes) -> None:
    (model / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match="JSON"):
        parse_json(text)
    with pytest.raises(UserError, match=r"config\.json: "):
        read_foreign_json(model / "config.json")
