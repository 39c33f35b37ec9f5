"""A wheel's commit, for `moba-train --version`, and its members in their order; pyproject.toml has the rest."""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

COMMIT = Path("moba_train", "COMMIT")


def note(folder: str) -> None:
    """Write the commit of this checkout, or of the sdist that this is, into `folder`; where none is known, remove what
    an earlier build has left there."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    text = COMMIT.read_text() if COMMIT.exists() else ""
    if Path(".git").exists():  # else git would name the commit of a repository around an unpacked sdist
        with suppress(OSError):  # git is not installed
            text = subprocess.run(command, capture_output=True, text=True).stdout
    noted = Path(folder, COMMIT)
    noted.write_text(text) if text else noted.unlink(missing_ok=True)


class BuildWithCommit(build_py):
    """The modules of a wheel. An editable one asks git each time."""

    def run(self) -> None:
        """Copy the modules, note the commit, and add pyproject.toml: metadata have entry points sorted by name."""
        super().run()
        if not self.editable_mode:
            note(self.build_lib)
            shutil.copy("pyproject.toml", Path(self.build_lib, "moba_train"))


class SdistWithCommit(sdist):
    """A source archive, of which a wheel is made where there is no git."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files, and note the commit."""
        super().make_release_tree(base_dir, files)
        note(base_dir)


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
