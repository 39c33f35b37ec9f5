"""Corpora of Python sources begin alike on every machine with the same Python."""

import sysconfig
from pathlib import Path

import pytest

from benchmarks import python_sources


def test_packages_change_nothing_before_pythons_own_sources_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    packages = python / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(python), "purelib": str(packages)})
    for number in range(9):
        (python / f"own{number}.py").touch()
    found = []
    for number in range(3):
        (packages / f"package{number}.py").touch()
        found.append([path.name for path in python_sources._sources.__wrapped__()[number + 1 :]])
    assert len(found[0]) == 9
    assert found[0] == found[1] == found[2]
