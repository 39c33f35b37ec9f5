"""Versions of optional packages that the docs, the image and `moba-train env` name."""

import re
import shlex
import tomllib

from moba_train.tools.environment import OPTIONAL_PACKAGES
from moba_train.tools.lm_eval import options as lm_eval
from moba_train.tools.report import sink as report
from tests.test_docker import ROOT


def test_the_image_the_guide_and_moba_train_env_name_the_same_versions() -> None:
    guide, dockerfile = (
        (ROOT / file).read_text() for file in ("docs/how-to/optional-packages.md", "docker/Dockerfile")
    )
    pinned = {name for package in OPTIONAL_PACKAGES for name in re.findall(r"[\w\[\],-]+==[\d.a-z]+", package.install)}
    assert len(pinned) == 6
    assert not {name for name in pinned if name not in guide or name not in dockerfile}


def test_commands_that_install_a_package_ask_for_what_the_extras_ask_for() -> None:
    """Commands name packages, because moba-train is on no index: so they hold for a checkout and for a wheel."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {requirement for extra in extras.values() for requirement in extra if ">=" in requirement}
    commands = [package.install for package in OPTIONAL_PACKAGES] + [report.INSTALL, lm_eval.INSTALL]
    asked = {word for command in commands if command.startswith("pip") for word in shlex.split(command) if ">=" in word}
    assert len(asked) == 5
    assert asked <= wanted
