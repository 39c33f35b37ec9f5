"""The training program, for which a folder with `model.yaml` is a published model of random weights.

    torchrun ... -m benchmarks.random_base RECIPE.yaml

Adapters need a base. Its values change no time, and 16 GB of them are neither written nor read.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

import moba_train.train
from moba_train.config.model import ModelConfig
from moba_train.model.transformer import Transformer
from moba_train.registry import WEIGHT_SOURCES
from moba_train.resolve.initial_weights import WeightSource

MODEL = "model.yaml"


def write_base(folder: Path, shape: dict[str, Any]) -> None:
    """Make `folder` a base of this shape, the section `model` of a recipe."""
    folder.mkdir(exist_ok=True)
    (folder / MODEL).write_text(yaml.safe_dump(shape))


class RandomWeights(WeightSource):
    """A base whose weights stay those that the seed draws."""

    def matches(self, folder: Path) -> bool:
        """Return True for a folder of `write_base`."""
        return (folder / MODEL).is_file()

    def model(self, folder: Path) -> ModelConfig:
        """Shape of the base."""
        return ModelConfig.model_validate(yaml.safe_load((folder / MODEL).read_text()))

    def check(self, model: ModelConfig, folder: Path) -> None:
        """Nothing: there are no files of weights."""

    def load(self, model: Transformer, folder: Path) -> str:
        """Leave the initial weights as they are."""
        return "the seed, at random"


def train(arguments: list[str]) -> int:
    """Train as one rank. Returns its exit code."""
    with WEIGHT_SOURCES.registered("random", RandomWeights):
        return moba_train.train.main(arguments)


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
