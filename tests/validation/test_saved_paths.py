"""Where the files of a checkpoint's recipe are looked for."""

import pwd
from pathlib import Path

import pytest

from moba_train.validation.saved_paths import _origin


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
