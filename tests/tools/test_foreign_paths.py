"""The files of a checkpoint's recipe: where they are looked for, and that none may lie outside the allowed folders."""

import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from moba_train.checkpoint import manifest, publish
from moba_train.config.load import dump_config, parse_config
from moba_train.config.schema import RunConfig
from moba_train.errors import CheckpointError
from moba_train.foreign_files import ROOTS, working_roots
from moba_train.tools.saved_recipe import (
    SavedPaths,
    _origin,
    check_paths,
    corpora_and_tokenizer,
    named_files,
    open_checkpoint,
)


def recipe(validation: str, tokenizer: str | None = None) -> RunConfig:
    model = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 2}
    data = {"train": [{"path": "/never/read/here"}], "validation": [{"path": validation}], "tokenizer": tokenizer}
    stages = [{"name": "only", "seq_len": 64, "tokens": 64}]
    return RunConfig.model_validate(
        {"name": "x", "run_dir": "/x", "model": model, "data": data, "batch_tokens": 64, "stages": stages}
    )


def check_recipe(config: RunConfig) -> None:
    check_paths(config, corpora_and_tokenizer(config), Path("c"), working_roots())


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "secret.bin").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv(ROOTS, raising=False)


def test_files_below_the_working_folder_may_be_read(tmp_path: Path) -> None:
    check_recipe(recipe("data/valid", str(tmp_path / "here" / "tokenizer.model")))


@pytest.mark.parametrize("path", ["../secret", "/etc/corpus", "data/../../secret", "link", "folder/secret", "a\0b"])
def test_paths_that_lead_out_are_refused_by_key(tmp_path: Path, path: str) -> None:
    (tmp_path / "here" / "link.bin").symlink_to(tmp_path / "secret.bin")
    (tmp_path / "here" / "folder").symlink_to(tmp_path)
    for config in (recipe(path), recipe("valid", path if path != "link" else "link.bin")):
        with pytest.raises(
            CheckpointError, match=rf"(data\.validation\[0\]\.path|data\.tokenizer) .*({ROOTS}=|null byte)"
        ):
            check_recipe(config)


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ("longppl", {"keys": "../secret.bin"}),
        ("longtasks", {"tasks": ["json_kv", "../secret.jsonl"]}),
        ("oracle", {"dense": "../secret.bin"}),
    ],
)
def test_files_of_evaluations_are_checked_unless_the_user_names_others(section: str, options: dict[str, Any]) -> None:
    config = recipe("valid")
    own = RunConfig.model_validate(config.model_dump(exclude_unset=True) | {"evaluation": {section: options}})
    secret = next(path for path in named_files(own.evaluation)[f"evaluation.{section}"] if "secret" in path)
    with pytest.raises(CheckpointError, match=rf"its recipe reads evaluation\.{section} '\.\./secret.*{ROOTS}="):
        check_paths(own, {secret}, Path("c"), working_roots())
    check_paths(config, {secret}, Path("c"), working_roots())
    check_paths(own, (), Path("c"), working_roots())


def test_the_user_may_allow_more_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOTS, f"/nowhere:{tmp_path}")
    check_recipe(recipe("../secret"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_named_as_a_folder_is_checked_by_its_files(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "here" / "tokenizer"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "secret.bin")
    for given in (str(folder), str(folder / "tokenizer.json")):
        with pytest.raises(CheckpointError, match=rf"data\.tokenizer .*{name}: leads to .*secret\.bin, outside"):
            check_recipe(recipe("valid", given))


@pytest.mark.parametrize("name", ["valid.idx", "valid.loss.bin", "tok.model"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    """Opening it would wait for a writer."""
    os.mkfifo(tmp_path / "here" / name)
    with pytest.raises(CheckpointError, match="is a named pipe; allowed: a regular file"):
        check_recipe(recipe("valid", "tok.model"))


def test_a_recipe_that_describes_more_than_the_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    """Before memory for its model is taken."""
    config = recipe("valid")
    (tmp_path / "checkpoints").mkdir()
    temporary = publish.make_temporary_folder(tmp_path / "checkpoints", 1)
    changes = {
        "model": config.model.model_copy(update={"vocab_size": 1 << 24}),
        "attention": config.attention.model_copy(update={"full_layers": "all"}),
    }
    large = config.model_copy(update=changes)
    meta = {"progress": {"step": 1, "stage": 0}, "config": dump_config(large)}
    manifest.write_json(temporary / manifest.META, meta)
    publish.publish(temporary, 1, {manifest.META: manifest.hash_file(temporary / manifest.META)})
    with pytest.raises(CheckpointError, match=r"recipe's model have 4,29\d,\d+,\d+ bytes, but its files"):
        open_checkpoint(tmp_path)


def test_the_folder_of_a_run_is_found_for_a_user_whom_the_system_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under another number, without HOME."""

    def unknown(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    assert _origin(Path("/data/project/runs/one"), "runs/one") == Path("/data/project")


def test_the_folder_that_holds_the_users_home_is_never_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    assert _origin(Path("/home/runs/one"), "runs/one") is None
    assert _origin(Path("/home/user/project/runs/one"), "runs/one") == Path("/home/user/project")


def test_corpora_are_found_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    checkpoints = project / "runs" / "one" / "checkpoints"
    checkpoints.mkdir(parents=True)
    temporary = publish.make_temporary_folder(checkpoints, 1)
    manifest.write_json(temporary / manifest.META, {})
    publish.publish(temporary, 1, {manifest.META: manifest.hash_file(temporary / manifest.META)})
    (project / "texts.idx").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = parse_config(
        """
        name: one
        run_dir: runs/one
        model: {vocab_size: 64, hidden_size: 32, intermediate_size: 48, layers: 1, heads: 2, kv_heads: 1}
        data: {train: [{path: corpus}], validation: [{path: texts}, {path: gone}]}
        batch_tokens: 64
        stages: [{name: only, seq_len: 64, tokens: 64}]
        """,
        "test",
    )
    located = SavedPaths(config, checkpoints / publish.step_name(1)).located()
    assert [source.path for source in located.data.validation] == [str(project / "texts"), "gone"]
