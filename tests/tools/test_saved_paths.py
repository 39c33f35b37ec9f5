"""Where the files of a checkpoint's recipe are looked for."""

import pwd
from pathlib import Path

import pytest

from moba_train.checkpoint import manifest, publish
from moba_train.config.load import parse_config
from moba_train.tools.saved_recipe import SavedPaths, _origin


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
