"""Addresses in the place of paths: what is read there is what lies there, and a wrong one is refused by its key."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from data_tools.input_files import find_files
from moba_train.config.load import dump_config
from moba_train.errors import ConfigError, UserError
from moba_train.foreign_files import local_path
from moba_train.tools.storage import remote
from moba_train.tools.storage.remote import CACHE, RemoteFolder, StorageError
from tests.run.tiny_run import Run
from tests.small_recipe import Load, load, recipe, write
from tests.tools.storage.server import BUCKET, Line

__all__ = ["load", "recipe", "write"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("bucket/run", "has no known scheme; allowed: s3://..., gs://..., file://..."),
        ("ftp://host/run", "has no known scheme; allowed: "),
        ("s3://", "names no folder"),
        ("s3://bucket/../other", "names no folder"),
        ("file://run", "is not absolute; allowed: file:///folder"),
        ("s3://bucket::file:///etc", "has a `@`, `?`, `#` or `::`"),
        ("s3://ID:hidden-word@bucket/run", "credentials have no place in an address"),
        ("s3://bucket/run?secret=hidden-word", "credentials have no place in an address"),
    ],
)
def test_an_address_that_is_none_is_refused_without_its_secrets(load: Load, address: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(f"checkpoint.upload={address}")
    (text,) = refused.value.problems
    assert text.startswith("checkpoint.upload.address: ")
    assert problem in text
    assert "hidden-word" not in text
    if "credentials" in problem:
        with pytest.raises(ConfigError, match=r"init_from: has a `@`, .*; credentials have no place in") as refused:
            load(f"init_from={address}")
        assert "hidden-word" not in str(refused.value)
    with pytest.raises(UserError) as told:
        RemoteFolder(address)
    assert problem in str(told.value)
    assert "hidden-word" not in str(told.value)


def test_a_folder_may_have_the_signs_of_an_address(load: Load) -> None:
    assert load("init_from=runs/one@2#3").init_from == "runs/one@2#3"


def test_the_short_form_and_the_section_say_the_same(load: Load) -> None:
    short = load("checkpoint.upload=s3://bucket/run/")
    assert short == load("checkpoint.upload.address=s3://bucket/run")
    assert "upload:\n    address: s3://bucket/run\n    keep_last: 2\n" in dump_config(short)
    with pytest.raises(ConfigError, match=r"checkpoint\.upload\.keep: unknown key"):
        load("checkpoint.upload.address=s3://bucket/run", "checkpoint.upload.keep=3")


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    load: Load, monkeypatch: pytest.MonkeyPatch, scheme: str, package: str
) -> None:
    monkeypatch.setattr(remote, "find_spec", lambda name: None if name == package else find_spec(name))
    problem = f"given {scheme}://b/run, but the package {package} is not installed; pip install "
    problem += "'s3fs>=2025.9'" if scheme == "s3" else package
    checkpoint = load(f"checkpoint.upload={scheme}://b/run").checkpoint
    assert list(checkpoint.member_problems("checkpoint")) == [f"checkpoint.upload: {problem}"]
    with pytest.raises(StorageError, match=problem):
        local_path(f"{scheme}://b/run")


def test_training_begins_with_weights_at_an_address(run: Run, tmp_path: Path, corpora: Path, line: Line) -> None:
    """The newest copy of another run, and a folder."""
    (tmp_path / "first").mkdir()
    first = Run(tmp_path / "first", corpora)
    address = f"s3://{BUCKET}/{tmp_path.name}"
    first.recipe["checkpoint"] |= {"upload": address}
    assert first.train_here("--stop-at-step", "3") == 0
    for place in (address, f"file://{first.run_dir}"):
        run.recipe |= {"init_from": place, "run_dir": str(tmp_path / place.partition(":")[0])}
        assert run.train_here("--stop-at-step", "1") == 0
        (text,) = [record["message"] for record in run.records("init_from")]
        assert "step_00000003" in text
    assert run.losses()[0] < first.losses()[0], "trained weights"
    with pytest.raises(UserError, match=f"{address}x: there is nothing"):
        local_path(f"{address}x")


def test_inputs_of_moba_data_may_be_addresses(tmp_path: Path, line: Line) -> None:
    address = f"s3://{BUCKET}/{tmp_path.name}"
    store = RemoteFolder(address)
    with pytest.raises(UserError, match=f"--input: {address}: there is nothing"):
        find_files([address], ["*.txt"], [])
    with pytest.raises(UserError, match=r"--evaluations: ftp://host/a\.txt has no known scheme"):
        find_files(["ftp://host/a.txt"], ["*.txt"], [], option="--evaluations")
    texts = {"a.txt": b"one", "deep/b.txt": b"two", "c.bin": b"no text"}
    for name, content in texts.items():
        store.write(name, content)
    found = find_files([address, f"{address}/a.txt"], ["*.txt"], [])
    assert [Path(path).read_bytes() for path in found] == [b"one", b"two", b"one"]
    gets = len(list((tmp_path / "cache").rglob("*.txt")))
    assert find_files([address, f"{address}/a.txt"], ["*.txt"], []) == found
    assert len(list((tmp_path / "cache").rglob("*.txt"))) == gets, "copied once"
    store.write("a.txt", b"changed")
    assert Path(find_files([f"{address}/a.txt"], ["*.txt"], [])[0]).read_bytes() == b"changed"


def test_a_name_that_leads_out_of_its_folder_is_refused(
    tmp_path: Path, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteFolder(f"s3://{BUCKET}/{tmp_path.name}")
    store.write("inside", b"")
    inner: Callable[..., dict[str, dict[str, object]]] = store._store.find
    monkeypatch.setattr(
        store._store,
        "find",
        lambda base, detail: {f"{base}/../../out": facts for facts in inner(base, detail=True).values()},
    )
    with pytest.raises(StorageError, match=r"holds a file '\.\./\.\./out'; allowed: names of files below it"):
        store.files()


def test_a_file_system_keeps_no_folders_that_are_empty(tmp_path: Path) -> None:
    remote = RemoteFolder(f"file://{tmp_path}")
    for name in ("step_1/one", "step_1/two", "step_2/one"):
        remote.write(name, b"")
    remote.delete("step_1/one", "step_2/one")
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert list(remote.files()) == ["step_1/two"]


def test_secrets_are_taken_out_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a/long+token")
    text = "GET https://host/key?X-Amz-Credential=1&X-Amz-Signature=2 a/long+token 500"
    assert remote.without_secrets(text) == "GET https://host/key?... $AWS_SESSION_TOKEN 500"
    assert os.environ["AWS_SESSION_TOKEN"] == "a/long+token"
