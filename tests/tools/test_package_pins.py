"""Versions of optional packages that the docs, the image and `moba-train env` name."""

import re

from moba_train.tools.environment import OPTIONAL_PACKAGES
from tests.test_docker import ROOT


def test_the_image_the_guide_and_moba_train_env_name_the_same_versions() -> None:
    guide, dockerfile = (
        (ROOT / file).read_text() for file in ("docs/how-to/optional-packages.md", "docker/Dockerfile")
    )
    pinned = {name for package in OPTIONAL_PACKAGES for name in re.findall(r"[\w\[\],-]+==[\d.a-z]+", package.install)}
    assert len(pinned) == 6
    assert not {name for name in pinned if name not in guide or name not in dockerfile}
